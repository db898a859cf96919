"""The transport between GPUs of one host: a GPU reads the memory of another one, which it has
mapped read only. Stamps are files of the host, and are copied by the CPU.

    keeper of the other pool ──descriptors──▶ this mover ──maps for its own GPUs──▶ copies

A copy is executed by the GPU that it writes to, on a stream of its own. So the driver's list of
that GPU shows when a mover that was killed writes no more, as it does for workers.
"""

import ctypes
import json
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

from kvops.backend import BackendUnavailable
from kvops.cuda import Driver, driver_of
from kvops.cuda.vmm import CopyQueue, DriverError, SharedMemory, allocation_bytes
from services.mover.transport import Area, OutOfReach, Region, State, TransportError, stamps_region
from services.pool.directory import PoolDirectory
from services.pool.header import BadHeader, PoolHeader
from services.pool.keeper import KeeperRefusal, borrow, close_all
from services.pool.stamps import Stamps
from services.runtime.errors import StartupError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

Copy = tuple[int, int, int]
"""The target address, the source address, and the number of bytes."""


def map_own(header: PoolHeader, fds: Sequence[int]) -> Region:
    """Map the arenas of the mover's pool, each for the GPU that has it. Takes over `fds`. Raises
    StartupError if a GPU is not there, or has no driver here."""
    try:
        return _mapped(drivers_of(header), header, fds, writable=True)
    except DriverError as error:
        raise StartupError(f"cannot map the pool {header.pool_id}: {error}") from error


def drivers_of(header: PoolHeader) -> list[Driver]:
    """Return the drivers of the GPUs that have the pool. Raises StartupError as `map_own` does."""
    try:
        return [driver_of(uuid) for uuid in header.gpu_uuids]
    except (DriverError, BackendUnavailable) as error:
        raise StartupError(f"cannot map the pool {header.pool_id}: {error}") from error


def _mapped(
    drivers: Sequence[Driver], header: PoolHeader, fds: Sequence[int], *, writable: bool
) -> Region:
    """Map the arenas, each for its GPU. Takes over `fds`. Raises DriverError."""
    memories: list[SharedMemory] = []
    left = list(fds)
    try:
        for driver in drivers:
            opened = SharedMemory.open(driver, left.pop(0), header.memory_bytes, writable)
            memories.append(opened)
    except BaseException:
        for memory in memories:
            memory.close()
        close_all(left)
        raise
    parts = tuple(memory.pointer for memory in memories)
    return Region(parts, header.layout.block_bytes, header.num_blocks, tuple(memories))


Source = dict[Area, Region]


class PeerTransport:
    """Copies between pools on GPUs of one host. After an error of a GPU, with which `on_failure` is
    called, this process's contexts may be unusable."""

    name: ClassVar[str] = "peer"

    def __init__(
        self, directory: PoolDirectory, header: PoolHeader, on_failure: Callable[[str], None]
    ) -> None:
        self._drivers = drivers_of(header)
        self._queues = [driver.copies() for driver in self._drivers]
        self._queueing = threading.Lock()
        self._directory = directory
        self._own: Region | None = None
        self._on_failure = on_failure

    def close(self) -> None:
        """Unmap the own pool, when no read of this side is RUNNING."""
        if self._own is not None:
            self.forget(self._own)

    def share(self, blocks: Region, stamps: Region) -> bytes:
        self._own = blocks
        where = {"host": _BOOT_ID.read_text().strip(), "pool": str(self._directory.path.resolve())}
        return json.dumps(where).encode()

    def allocate(self, num_parts: int, item_bytes: int, num_items: int) -> Region:
        try:
            memories = tuple(
                SharedMemory.create(driver, allocation_bytes(driver, item_bytes * num_items))
                for driver in self._drivers[:num_parts]
            )
        except DriverError as error:
            raise TransportError(str(error)) from error
        parts = tuple(memory.pointer for memory in memories)
        return Region(parts, item_bytes, num_items, memories)

    def prepare(self, region: Region) -> Region:
        return region

    def forget(self, prepared: Region) -> None:
        for memory in prepared.memories:
            if isinstance(memory, SharedMemory):
                memory.close()

    def connect(self, memory: bytes) -> Source:
        try:
            where = json.loads(memory)
            directory = PoolDirectory(Path(where["pool"]))
            if where["host"] != _BOOT_ID.read_text().strip():
                raise OutOfReach("it is on GPUs of another host")
            header = directory.read_header()
            fds = borrow(directory.path.parent, directory.pool_id)
            blocks = _mapped(self._drivers, header, fds, writable=False)
        except (KeyError, TypeError, ValueError, OSError, BadHeader, KeeperRefusal) as error:
            raise TransportError(f"no access to the memory of a pool: {error}") from error
        except DriverError as error:
            raise OutOfReach(f"a GPU cannot map it: {error}") from error
        stamps = Stamps(directory.stamps, header.num_blocks, header.layout.block_size)
        return {Area.BLOCKS: blocks, Area.STAMPS: stamps_region(stamps, header)}

    def disconnect(self, source: Source) -> None:
        self.forget(source[Area.BLOCKS])

    def read(
        self,
        source: Source,
        area: Area,
        items: Sequence[int],
        target: Region,
        places: Sequence[int],
    ) -> "_Reads":
        remote = source[area]
        by_part = [
            _copies(remote.item_bytes, to, begin, items, places)
            for to, begin in zip(target.parts, remote.parts, strict=True)
        ]
        if area is Area.STAMPS:
            for copy in by_part[0]:
                ctypes.memmove(*copy)
            return _Reads([], self._on_failure)
        try:
            with self._queueing:
                marks = list(map(_queued, self._queues, by_part))
        except DriverError as error:
            self._on_failure(str(error))
            raise TransportError(str(error)) from error
        return _Reads(marks, self._on_failure)


def _copies(
    size: int, target: int, source: int, items: Sequence[int], places: Sequence[int]
) -> list[Copy]:
    """List the copies of one part. Items that are neighbours in both memories are one copy."""
    found: list[Copy] = []
    for item, place in zip(items, places, strict=True):
        to, begin = target + place * size, source + item * size
        if found and (to, begin) == (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]):
            found[-1] = *found[-1][:2], found[-1][2] + size
        else:
            found.append((to, begin, size))
    return found


def _queued(queue: CopyQueue, copies: Sequence[Copy]) -> Callable[[], bool]:
    for copy in copies:
        queue.copy(*copy)
    return queue.mark()


class _Reads:
    """The copies of one read, on each GPU."""

    def __init__(self, marks: list[Callable[[], bool]], on_failure: Callable[[str], None]) -> None:
        self._marks = marks
        self._on_failure = on_failure

    def poll(self) -> State:
        try:
            self._marks = [mark for mark in self._marks if not mark()]
        except DriverError as error:
            self._on_failure(str(error))
            return State.FAILED
        return State.RUNNING if self._marks else State.DONE

    def release(self) -> None:
        """Do nothing: no memory is kept for a read."""
