"""Weights as the native kernels want them, packed once and kept in a file that every worker of the
host maps: one copy in memory, ready at the next start.

A file is: the magic, the digest of all that follows, the length of the header, the header in JSON,
then the sections, each from a page's begin on. The header names what the file was made from; a file
made from anything else, half written or changed since is made again. It may be deleted at any time.
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
_DIGEST = slice(8, 16)
_LENGTH = slice(16, 24)
_TEXT = 24

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
    if mapped[: len(_MAGIC)] != _MAGIC or mapped[_DIGEST] != _digest(mapped):
        log.warning("packed_weights_damaged", path=str(path))
        return None
    end = _TEXT + int.from_bytes(mapped[_LENGTH], "little")
    header = json.loads(mapped[_TEXT:end])
    return PackedFile(header["facts"], _views(mapped, _padded(end), header["sections"]))


def _write(path: Path, facts: Facts, sizes: Mapping[str, int], fill: Fill) -> None:
    """Under another name first: a file with its own is whole."""
    sections = dict(_places(sizes))
    text = json.dumps({"facts": facts, "sections": sections}).encode()
    begin = _padded(_TEXT + len(text))
    unfinished = path.with_name(f"{path.name}.part")
    try:
        with unfinished.open("w+b") as file:
            size = begin + sum(_padded(length) for length in sizes.values())
            os.posix_fallocate(file.fileno(), 0, size)
            mapped = mmap.mmap(file.fileno(), size)
        fill(_views(mapped, begin, sections))
        mapped[_LENGTH] = len(text).to_bytes(8, "little")
        mapped[_TEXT : _TEXT + len(text)] = text
        mapped[_DIGEST] = _digest(mapped)
        mapped[: len(_MAGIC)] = _MAGIC
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _places(sizes: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, int]]]:
    """Offset, counted from where sections begin, and length of every section."""
    offset = 0
    for name, length in sizes.items():
        yield name, (offset, length)
        offset += _padded(length)


def _views(
    mapped: mmap.mmap, begin: int, sections: Mapping[str, tuple[int, int]]
) -> dict[str, Tensor]:
    contents = torch.frombuffer(mapped, dtype=torch.uint8)[begin:]
    return {name: contents[at : at + length] for name, (at, length) in sections.items()}


def _digest(mapped: mmap.mmap) -> bytes:
    """Of all behind the digest's own place."""
    with memoryview(mapped) as view, view[_DIGEST.stop :] as contents:
        return xxhash.xxh3_64_digest(contents)


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE
