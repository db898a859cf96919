"""The packed file: weights in the layout of the native kernels. It is made once, and every worker
of the host maps it: there is one copy in memory, ready at the next start.

    offset  0   magic, 8 bytes
            8   digest of everything after it, 8 bytes
           16   length of the header, 8 bytes, little-endian
           24   header, JSON: facts, and offset and length of each section
                sections, each aligned to a page

The facts name what the file was made from. A file that was made from anything else, is incomplete
or was changed is made again. The file may be deleted at any time: before a new one is written,
those go that no start has used for `_KEPT_S`, and where the disk has no room for it, the least
recently used ones. A start sets the file's time of modification.

See ADR 44.
"""

import fcntl
import json
import mmap
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor

from services.runtime.errors import StartupError
from services.runtime.logging import get_logger

log = get_logger(__name__)

_PAGE = 4096
_MAGIC = b"QUIREPK1"
_DIGEST = slice(8, 16)
_LENGTH = slice(16, 24)
_TEXT = 24

_WRITTEN_BYTES = 32 << 20
_DIGESTED_BYTES = 64 << 20
_LOCK_INTERVAL_S = 0.05
_KEPT_S = 30 * 24 * 3600.0
_ROOM = 2
"""A new file is written where so many of its size fit."""

Facts = Mapping[str, Any]
"""The sources of a packed file, as JSON values."""

Contents = Callable[[str], Iterable[Tensor]]
"""Yields the bytes of the section with the given name in order, as uint8 tensors of any size. Each
tensor stays valid until the next one is requested."""

Progress = Callable[[], None]
"""Called repeatedly during long work; an exception that it raises ends the work."""


@dataclass(frozen=True, slots=True)
class PackedFile:
    """A mapped packed file. `sections` are uint8 views of the mapped memory, to be read only."""

    facts: Facts
    sections: Mapping[str, Tensor]


def packed_file(
    path: Path,
    is_current: Callable[[Facts], bool],
    make: Callable[[], tuple[Facts, Mapping[str, int], Contents]],
    progress: Progress,
) -> PackedFile:
    """Map the file at `path`; make it first if it is missing, incomplete or not current.

    `make` returns the facts of the new file, the sizes of its sections in bytes, and their
    contents. If several workers start at once, one makes the file and the others wait. An exception
    of `progress` leaves no unfinished file. Raises StartupError if the file cannot be read or
    written.
    """

    def current() -> PackedFile | None:
        found = _open_if_intact(path, progress)
        if found is None or not is_current(found.facts):
            return None
        with suppress(OSError):  # it belongs to another user
            os.utime(path)
        return found

    try:
        if (found := current()) is not None:
            return found
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(path.with_name(f"{path.name}.lock"), progress):
            if (found := current()) is not None:
                return found
            facts, sizes, contents = make()
            _make_room(path, sum(sizes.values()))
            _write(path, facts, sizes, contents)
            return _read(_map(path))
    except OSError as error:
        raise StartupError(f"packed weights {path}: {error.strerror}") from error


@contextmanager
def locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold an exclusive lock on the file at `path`. The file is created if missing, and stays."""
    with path.open("ab") as file:
        while True:
            try:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                progress()
                time.sleep(_LOCK_INTERVAL_S)
        yield


def _make_room(path: Path, num_bytes: int) -> None:
    """Remove old packed files beside `path`. A process that has mapped one keeps its memory."""
    files = [each for each in path.parent.iterdir() if _is_packed(each) and each != path]
    for file in sorted(files, key=lambda each: each.stat().st_mtime):
        is_old = time.time() - file.stat().st_mtime > _KEPT_S
        if is_old or shutil.disk_usage(path.parent).free < _ROOM * num_bytes:
            log.info("packed_weights_removed", path=str(file), unused=is_old)
            file.unlink(missing_ok=True)


def _is_packed(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


def _open_if_intact(path: Path, progress: Progress) -> PackedFile | None:
    """The mapped file, or None if it is missing or damaged."""
    try:
        mapped = _map(path)
    except (FileNotFoundError, ValueError):  # An empty file cannot be mapped.
        return None
    if mapped[: len(_MAGIC)] != _MAGIC or mapped[_DIGEST] != _digest(mapped, progress):
        log.warning("packed_weights_damaged", path=str(path))
        return None
    return _read(mapped)


def _map(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        # torch needs a writable buffer, so the mapping is copy-on-write; nothing writes to it.
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)


def _read(mapped: mmap.mmap) -> PackedFile:
    end = _TEXT + int.from_bytes(mapped[_LENGTH], "little")
    header = json.loads(mapped[_TEXT:end])
    contents = torch.frombuffer(mapped, dtype=torch.uint8)[_padded(end) :]
    places = header["sections"].items()
    return PackedFile(
        header["facts"], {name: contents[at : at + length] for name, (at, length) in places}
    )


def _digest(mapped: mmap.mmap, progress: Progress) -> bytes:
    """The digest of everything after the digest itself."""
    digest = xxhash.xxh3_64()
    with memoryview(mapped) as view:
        for begin in range(_DIGEST.stop, len(view), _DIGESTED_BYTES):
            with view[begin : begin + _DIGESTED_BYTES] as piece:
                digest.update(piece)
            progress()
    return digest.digest()


def _write(path: Path, facts: Facts, sizes: Mapping[str, int], contents: Contents) -> None:
    """Write the file under a temporary name and rename it: a file with its own name is complete."""
    text = json.dumps({"facts": facts, "sections": dict(_offsets(sizes))}).encode()
    unfinished = path.with_name(f"{path.name}.part")
    try:
        # Writes of 2 MiB and more go to huge pages of the page cache. A mapping would fault in page
        # after page, many times as slowly.
        with unfinished.open("wb", buffering=_WRITTEN_BYTES) as file:
            file.write(bytes(_DIGEST.stop))
            out = _DigestWriter(file)
            out.write(len(text).to_bytes(_LENGTH.stop - _LENGTH.start, "little") + text)
            for name, length in sizes.items():
                out.pad()
                begin = out.position
                for piece in contents(name):
                    out.write(piece.numpy().data)
                if out.position != begin + length:
                    raise ValueError(f"{name} has {out.position - begin} bytes, not {length}")
            out.pad()
            file.seek(0)
            file.write(_MAGIC + out.digest.digest())
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


class _DigestWriter:
    """Writes what follows the digest to a file; computes the digest and the position meanwhile."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.position = _DIGEST.stop
        self.digest = xxhash.xxh3_64()

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.position += len(data)

    def pad(self) -> None:
        """Pad with zeros to the start of the next page."""
        self.write(bytes(_padded(self.position) - self.position))


def _offsets(sizes: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, int]]]:
    """(name, (offset, length)) of every section; offsets count from the first section."""
    offset = 0
    for name, length in sizes.items():
        yield name, (offset, length)
        offset += _padded(length)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
