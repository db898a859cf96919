"""The CPU board: a file, mapped by all workers of a host, that says which workers are busy.

An entry has 64 bytes: its worker's backlog (int32: how many sequences it computes now; 0 if it
needs no CPU), then role, NUMA nodes and name. The worker keeps its entry locked with a POSIX record
lock, which the kernel drops when the process dies. So every entry that can be locked is free.

See ADR 45.
"""

import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from services.runtime.errors import StartupError
from services.runtime.numa.topology import format_cpus, parse_cpus

ENTRY_BYTES = 64
ENTRY_WORDS = ENTRY_BYTES // 4
NUM_ENTRIES = 256
_NAME = slice(4, ENTRY_BYTES)
_TAKING = 1 << 30
"""The byte that a worker locks while it chooses its nodes and takes its entry."""


@dataclass(frozen=True, slots=True, order=True)
class CpuBoardEntry:
    """A worker's entry."""

    worker_id: str
    role: str
    index: int
    """The position on the board, in units of ENTRY_BYTES."""
    nodes: tuple[int, ...] = (0,)
    """The NUMA nodes that have the worker's threads and memory, as long as it lives."""


class CpuBoard:
    """One process's view of the board, with at most one entry of its own.

    The process must not open the file a second time: closing that would drop the entry's lock.
    """

    def __init__(self, path: Path) -> None:
        """Open the board, or make it. Raises OSError if the file cannot be made or mapped."""
        self._fd: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.posix_fallocate(self._fd, 0, NUM_ENTRIES * ENTRY_BYTES)
        self.memory = mmap.mmap(self._fd, NUM_ENTRIES * ENTRY_BYTES)
        self._words = memoryview(self.memory).cast("i")
        self._own: CpuBoardEntry | None = None

    def take_entry(
        self,
        role: str,
        worker_id: str,
        choose_nodes: Callable[[Sequence[CpuBoardEntry]], tuple[int, ...]] = lambda _: (0,),
    ) -> CpuBoardEntry:
        """Take a free entry for this process. `choose_nodes` gets the entries of all others, and no
        other process takes an entry meanwhile. Raises StartupError if no entry is free."""
        assert self._fd is not None
        fcntl.lockf(self._fd, fcntl.LOCK_EX, 1, _TAKING)
        try:
            return self._take_entry(role, worker_id, choose_nodes(self.entries()))
        finally:
            fcntl.lockf(self._fd, fcntl.LOCK_UN, 1, _TAKING)

    def _take_entry(self, role: str, worker_id: str, nodes: tuple[int, ...]) -> CpuBoardEntry:
        for index in range(NUM_ENTRIES):
            if self._lock(index):
                return self._write_own(CpuBoardEntry(worker_id, role, index, nodes))
        raise StartupError(
            f"this host already has {NUM_ENTRIES} workers, the most that can share it"
        )

    def change_role(self, role: str) -> CpuBoardEntry:
        """Change the role in the own entry, which this process must have."""
        assert self._own is not None
        return self._write_own(replace(self._own, role=role))

    def _write_own(self, entry: CpuBoardEntry) -> CpuBoardEntry:
        text = f"{entry.role} {format_cpus(entry.nodes)} {entry.worker_id}"
        self._write(entry.index, text.encode())
        self._own = entry
        return entry

    def entries(self) -> tuple[CpuBoardEntry, ...]:
        """The entries of all living workers, sorted by worker id."""
        found = (self._entry(index) for index in range(NUM_ENTRIES) if self._text(index))
        return tuple(sorted(entry for entry in found if entry is not None))

    def backlog(self, entry: CpuBoardEntry) -> int:
        return self._words[entry.index * ENTRY_WORDS]

    def set_backlog(self, num_sequences: int) -> None:
        """Set the backlog in the own entry; no effect without one."""
        if self._own is not None:
            self._words[self._own.index * ENTRY_WORDS] = num_sequences

    def leave(self) -> None:
        """Free the own entry and close the file. No error if called twice."""
        if self._fd is None:
            return
        if self._own is not None:
            self._write(self._own.index, b"")
            self._own = None
        os.close(self._fd)
        self._fd = None

    def _entry(self, index: int) -> CpuBoardEntry | None:
        if self._own is not None and index == self._own.index:
            return self._own
        text = self._text(index)
        if self._lock(index):
            # Its worker died. If another worker finds the entry locked in this short time, it takes
            # another entry.
            if self._text(index) == text:
                self._write(index, b"")
            self._unlock(index)
            return None
        try:
            role, nodes, worker_id = text.decode(errors="replace").split(" ", 2)
            return CpuBoardEntry(worker_id, role, index, tuple(sorted(parse_cpus(nodes))))
        except ValueError:
            return None  # its worker is writing it

    def _text(self, index: int) -> bytes:
        entry = self.memory[index * ENTRY_BYTES : (index + 1) * ENTRY_BYTES]
        return entry[_NAME].rstrip(b"\0")

    def _write(self, index: int, text: bytes) -> None:
        """Write role and name, with backlog 0."""
        size = _NAME.stop - _NAME.start
        self._words[index * ENTRY_WORDS] = 0
        begin = index * ENTRY_BYTES
        self.memory[begin + _NAME.start : begin + _NAME.stop] = text[:size].ljust(size, b"\0")

    def _lock(self, index: int) -> bool:
        assert self._fd is not None
        with suppress(BlockingIOError, PermissionError):
            flags = fcntl.LOCK_EX | fcntl.LOCK_NB
            fcntl.lockf(self._fd, flags, ENTRY_BYTES, index * ENTRY_BYTES)
            return True
        return False

    def _unlock(self, index: int) -> None:
        assert self._fd is not None
        fcntl.lockf(self._fd, fcntl.LOCK_UN, ENTRY_BYTES, index * ENTRY_BYTES)
