"""Weights as the native kernels want them, packed once and kept in a file that every worker of the
host maps: one copy in memory, ready at the next start.

A file is: the magic, the digest of all that follows, the length of the header, the header in JSON,
then the sections, each from a page's begin on. The header names what the file was made from; a file
made from anything else, half written or changed since is made again. It may be deleted at any time.

See ADR 44.
"""

import fcntl
import json
import mmap
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import xxhash
from torch import Tensor

from services.common.errors import StartupError
from services.common.runtime.logging import get_logger

log = get_logger(__name__)

_PAGE = 4096
_MAGIC = b"QUIREPK1"
_DIGEST = slice(8, 16)
_LENGTH = slice(16, 24)
_TEXT = 24

_WRITTEN_BYTES = 32 << 20
_DIGESTED_BYTES = 64 << 20
_LOCK_INTERVAL_S = 0.05

Facts = Mapping[str, Any]
"""JSON: what a file was made from."""

Contents = Callable[[str], Iterable[Tensor]]
"""The bytes of a section, by its name: uint8, from front to back in pieces of any size; each is
needed until the next one is asked for."""

Progress = Callable[[], None]
"""Called every now and then by what takes long; what it raises ends that."""


@dataclass(frozen=True, slots=True)
class PackedFile:
    """`sections`: uint8, read-only memory of the mapped file. `facts`: what it was made from."""

    facts: Facts
    sections: Mapping[str, Tensor]


def packed_file(
    path: Path,
    is_current: Callable[[Facts], bool],
    make: Callable[[], tuple[Facts, Mapping[str, int], Contents]],
    progress: Progress,
) -> PackedFile:
    """The file at `path` if it is whole and current, else a new one: `make` says its facts, the
    sizes of its sections in bytes, and what is in them.

    Of several workers that start at once, one makes it and the others wait. StartupError: there is
    no room, or no right to write there. Whatever `progress` raises leaves nothing half made.
    """

    def current() -> PackedFile | None:
        found = _opened(path, progress)
        return found if found is not None and is_current(found.facts) else None

    try:
        if (found := current()) is not None:
            return found
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(path.with_name(f"{path.name}.lock"), progress):
            if (found := current()) is not None:
                return found
            _write(path, *make())
            return _read(_mapped(path))
    except OSError as error:
        raise StartupError(f"packed weights {path}: {error.strerror}") from error


@contextmanager
def locked(path: Path, progress: Progress) -> Iterator[None]:
    """Holds the lock of the file at `path`, which stays."""
    with path.open("ab") as file:
        while not _locks(file.fileno()):
            progress()
            time.sleep(_LOCK_INTERVAL_S)
        yield


def _locks(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _opened(path: Path, progress: Progress) -> PackedFile | None:
    """None: it is not there, or not whole."""
    try:
        mapped = _mapped(path)
    except (FileNotFoundError, ValueError):  # An empty file cannot be mapped.
        return None
    if mapped[: len(_MAGIC)] != _MAGIC or mapped[_DIGEST] != _digest(mapped, progress):
        log.warning("packed_weights_damaged", path=str(path))
        return None
    return _read(mapped)


def _mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        # Private, so that torch may take it for writable; nobody writes, so nothing is copied.
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
    """Of all behind the digest's own place."""
    digest = xxhash.xxh3_64()
    with memoryview(mapped) as view:
        for begin in range(_DIGEST.stop, len(view), _DIGESTED_BYTES):
            with view[begin : begin + _DIGESTED_BYTES] as piece:
                digest.update(piece)
            progress()
    return digest.digest()


def _write(path: Path, facts: Facts, sizes: Mapping[str, int], contents: Contents) -> None:
    """Under another name first: a file with its own is whole."""
    text = json.dumps({"facts": facts, "sections": dict(_places(sizes))}).encode()
    unfinished = path.with_name(f"{path.name}.part")
    try:
        # By writes of 2 MiB and more, which the kernel keeps in huge pages, and many times as fast
        # as through a mapping, which asks the file system for page after page.
        with unfinished.open("wb", buffering=_WRITTEN_BYTES) as file:
            file.write(bytes(_DIGEST.stop))
            out = _Digesting(file)
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


class _Digesting:
    """Writes to a file, from behind the digest on."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.position = _DIGEST.stop
        self.digest = xxhash.xxh3_64()

    def write(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self.digest.update(data)
        self.position += len(data)

    def pad(self) -> None:
        """To the next page's begin."""
        self.write(bytes(_padded(self.position) - self.position))


def _places(sizes: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Offset, counted from where sections begin, and length of every section."""
    offset = 0
    for name, length in sizes.items():
        yield name, (offset, length)
        offset += _padded(length)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
