"""Weights as the native kernels want them, packed once and kept in a file that every worker of the
host maps: one copy in memory, ready at the next start.

A file is: a header of JSON padded to 4 KiB pages, then the sections, each on a page of its own. The
header names what the file was made from; a file made from anything else, half written or changed
since is made again. It may be deleted at any time.
"""

import fcntl
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from services.common.errors import StartupError
from services.common.logging import get_logger

log = get_logger(__name__)

_PAGE = 4096
_MAGIC = b"QUIREPK1"
_TEXT = len(_MAGIC) + 8  # where the JSON begins, after its length
_HEADER_ROOM, _ENTRY_ROOM = 512, 128  # bytes; a section's entry takes about 40

Facts = Mapping[str, Any]
"""JSON: what a file was made from."""

Fill = Callable[[Mapping[str, Tensor]], None]
"""Writes every section."""


@dataclass(frozen=True, slots=True)
class PackedFile:
    """`sections`: uint8, read-only memory of the mapped file. `facts`: what it was made from."""

    facts: Facts
    sections: Mapping[str, Tensor]


def packed_file(
    path: Path,
    is_current: Callable[[Facts], bool],
    make: Callable[[], tuple[Facts, Mapping[str, int], Fill]],
) -> PackedFile:
    """The file at `path` if it is whole and current, else a new one: `make` says its facts, the
    sizes of its sections in bytes, and what fills them.

    Of several workers that start at once, one makes it and the others wait. StartupError: there is
    no room, or no right to write there.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _locked(path.with_name(f"{path.name}.lock")):
            found = _opened(path)
            if found is None or not is_current(found.facts):
                found = None
                _write(path, *make())
                found = _opened(path)
    except OSError as error:
        raise StartupError(f"packed weights {path}: {error.strerror}") from error
    if found is None:
        raise StartupError(f"packed weights {path}: damaged while they were written")
    return found


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _opened(path: Path) -> PackedFile | None:
    """None: it is not there, or not whole."""
    try:
        with path.open("rb") as file:
            # Private, so that torch may take it for writable; nobody writes, so nothing is copied.
            mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except FileNotFoundError:
        return None
    except ValueError:  # An empty file cannot be mapped.
        return None
    header = _header(mapped)
    if header is None:
        log.warning("packed_weights_damaged", path=str(path))
        return None
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    sections = {name: whole[at : at + length] for name, (at, length) in header["sections"].items()}
    return PackedFile(header["facts"], sections)


def _header(mapped: mmap.mmap) -> dict[str, Any] | None:
    """None unless everything is there and nothing has changed since it was written."""
    num_bytes = int.from_bytes(mapped[len(_MAGIC) : _TEXT], "little")
    if mapped[: len(_MAGIC)] != _MAGIC or num_bytes > len(mapped) - _TEXT:
        return None
    try:
        header: dict[str, Any] = json.loads(mapped[_TEXT : _TEXT + num_bytes])
    except ValueError:
        return None
    whole = header["size"] == len(mapped) and header["digest"] == _digest(mapped, header["begin"])
    return header if whole else None


def _write(path: Path, facts: Facts, sizes: Mapping[str, int], fill: Fill) -> None:
    """Under another name first: a file with its own is whole."""
    begin = _padded(_HEADER_ROOM + _ENTRY_ROOM * len(sizes) + len(json.dumps(facts)))
    sections = dict(_places(sizes, begin))
    size = max(at + _padded(length) for at, length in sections.values())
    unfinished = path.with_name(f"{path.name}.part")
    try:
        with unfinished.open("w+b") as file:
            os.posix_fallocate(file.fileno(), 0, size)
            mapped = mmap.mmap(file.fileno(), size)
        whole = torch.frombuffer(mapped, dtype=torch.uint8)
        fill({name: whole[at : at + length] for name, (at, length) in sections.items()})
        header = {"facts": facts, "sections": sections, "begin": begin, "size": size}
        text = json.dumps({**header, "digest": _digest(mapped, begin)}).encode()
        mapped[: _TEXT + len(text)] = _MAGIC + len(text).to_bytes(8, "little") + text
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _places(sizes: Mapping[str, int], begin: int) -> Iterator[tuple[str, tuple[int, int]]]:
    """Offset and length of every section."""
    for name, length in sizes.items():
        yield name, (begin, length)
        begin += _padded(length)


def _digest(mapped: mmap.mmap, begin: int) -> str:
    with memoryview(mapped) as view, view[begin:] as contents:
        return xxhash.xxh3_64_hexdigest(contents)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
