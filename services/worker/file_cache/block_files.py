"""Files of blocks: their format, and the budget of their directory.

    DIR/                            mode 0700
        <fingerprint>/              32 hexadecimal digits
            <prefix hash>           a block: 32 hexadecimal digits, mode 0600
            writing-<worker>        the block that a worker is writing

    fingerprint | prefix hash | parent hash | token ids | KV | xxh3-128 of all before

A block gets its name once it is written. Nothing is synced, so a file may be torn after the host
has crashed. A reader therefore compares all that is before the KV with what it expects (law 6),
and then the checksum, and removes a file that it doubts.

All workers of the host share a directory. A file's modification time is the time of its last use,
less _AGE_S for each block that is before it in the prompt, because the end of a prompt is of no use
without its beginning. The files with the earliest times are removed first: a worker that finds more
than 95 % of the budget leaves 90 %. All workers together write at most 5 % between two such looks.
"""

import errno
import os
import re
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from xxhash import xxh3_128

from blockstore.records import PrefixHash

_NAME = re.compile(r"[0-9a-f]{32}|writing-.+")
_AGE_S = 0.1
"""Longer than the computation of most blocks takes, so that it decides the order."""


class BadFile(Exception):
    """A file that does not hold the block of its name, and was removed."""


@dataclass(frozen=True, slots=True)
class BlockName:
    """The identity of a block: the fields of its stamp, and its place in the prompt, from 0."""

    prefix_hash: PrefixHash
    parent: PrefixHash
    token_ids: Sequence[int]
    number: int


class BlockFiles:
    """The blocks of one pool in files, as one worker of `num_writers` reads and writes them."""

    def __init__(
        self, root: Path, fingerprint: str, worker_id: str, budget_bytes: int, num_writers: int
    ) -> None:
        self._root = root
        self._fingerprint = fingerprint
        self._directory = root / fingerprint
        self._draft = self._directory / f"writing-{worker_id}"
        self._budget_bytes = budget_bytes
        self._num_writers = num_writers
        self._room_bytes = 0
        """The bytes that this worker may write before it looks again how full the directory is."""

    def has(self, prefix_hash: PrefixHash) -> bool:
        return os.access(self._path(prefix_hash), os.R_OK)

    def read(self, name: BlockName, target: memoryview) -> bool:
        """Read a block's KV into `target`; False if there is no such file. Raises BadFile; `target`
        then has any content."""
        path, expected = self._path(name.prefix_hash), self._head(name)
        head, digest = bytearray(len(expected)), bytearray(16)
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.preadv(fd, [head, target, digest], 0)
                _touch(fd, name.number)
            finally:
                os.close(fd)
        except FileNotFoundError:
            return False
        except OSError as error:
            self._drop(path)
            raise BadFile(str(error)) from error
        if head != expected or digest != _checksum(head, target):
            self._drop(path)
            raise BadFile(f"{path} is damaged, or has not the block of its name")
        return True

    def touch(self, prefix_hash: PrefixHash, number: int) -> bool:
        """Note a use of a block; False if there is no such file. Raises OSError."""
        try:
            _touch(self._path(prefix_hash), number)
        except FileNotFoundError:
            return False
        return True

    def write(self, name: BlockName, kv: memoryview, is_unchanged: Callable[[], bool]) -> bool:
        """Write a block, unless `is_unchanged` says afterwards that `kv` changed meanwhile; returns
        whether it is kept. Raises OSError."""
        head = self._head(name)
        parts: list[bytes | memoryview] = [head, kv, _checksum(head, kv)]
        num_bytes = sum(map(len, parts))
        if self._room_bytes < num_bytes:
            self._make_room(num_bytes)
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
            fd = os.open(self._draft, flags, 0o600)
            try:
                if os.pwritev(fd, parts, 0) < num_bytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._draft))
                _touch(fd, name.number)
            finally:
                os.close(fd)
            if not is_unchanged():
                self._draft.unlink()
                return False
            self._draft.replace(self._path(name.prefix_hash))
            self._room_bytes -= num_bytes
            return True
        except OSError:
            self._room_bytes = 0  # the directory may be gone
            self._drop(self._draft)
            raise

    def remove(self, prefix_hash: PrefixHash) -> None:
        """Remove a block. No error if it has no file."""
        self._drop(self._path(prefix_hash))

    @staticmethod
    def _drop(path: Path) -> None:
        with suppress(OSError):  # gone already, or the file system has become read-only
            path.unlink()

    def _make_room(self, num_bytes: int) -> None:
        """Keep the budget, also if a twentieth of it is less than a file for each worker."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._directory.mkdir(mode=0o700, exist_ok=True)
        spare = max(self._budget_bytes // 20, self._num_writers * num_bytes)
        found = sorted(self._found())
        used = sum(size for _, size, _ in found)
        if used > self._budget_bytes - spare:
            for _, size, path in found:
                if used <= self._budget_bytes - 2 * spare:
                    break
                self._drop(Path(path))
                used -= size
        self._room_bytes = spare // self._num_writers

    def _found(self) -> Iterator[tuple[int, int, str]]:
        """The last use, the size and the path of each file, also of other fingerprints."""
        for directory in os.scandir(self._root):
            if _NAME.fullmatch(directory.name) and directory.is_dir(follow_symlinks=False):
                for file in filter(lambda file: _NAME.fullmatch(file.name), os.scandir(directory)):
                    with suppress(FileNotFoundError):
                        status = file.stat(follow_symlinks=False)
                        yield status.st_mtime_ns, status.st_size, file.path

    def _path(self, prefix_hash: PrefixHash) -> Path:
        return self._directory / prefix_hash.hex()

    def _head(self, name: BlockName) -> bytes:
        tokens = array("I", name.token_ids).tobytes()
        return self._fingerprint.encode() + name.prefix_hash + name.parent + tokens


def _touch(file: int | Path, number: int) -> None:
    used_at = time.time_ns() - int(number * _AGE_S * 1e9)
    os.utime(file, ns=(used_at, used_at))


def _checksum(head: bytes | bytearray, kv: memoryview) -> bytes:
    digest = xxh3_128(head)
    digest.update(kv)
    return digest.digest()
