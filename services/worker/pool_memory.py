"""Where the arena of a pool is: in a file of the host's memory, or in the memory of a GPU."""

import os
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from blockstore.errors import PoolGone
from kvops.cuda.vmm import DeviceLost, Driver, DriverError, allocation_bytes
from services.engine.pool import Arena, CudaArena, FileArena
from services.pool.arena import make_file, missing_bytes
from services.pool.directory import PoolDirectory, pool_directories
from services.pool.header import ArenaKind, PoolHeader
from services.pool.keeper import (
    KeptMemory,
    Registration,
    close_all,
    register,
    release_removed,
)
from services.pool.layout import PoolLayout
from services.pool.memory import available_bytes
from services.pool.sizing import MemoryPlan, num_blocks_for
from services.pool.stamps import record_bytes
from services.runtime.errors import StartupError


@dataclass(frozen=True, slots=True)
class OpenArena:
    """A mapped arena, and the worker's registration at the keeper if it is on a GPU."""

    arena: Arena
    kept: KeptMemory | None = None


class FileMemory:
    """The arena is the file `kv` of the pool's directory."""

    kind: ArenaKind = "file"
    gpu_uuids: tuple[str, ...] = ()
    """The GPU of each rank; empty for files."""

    def __init__(self, available: Callable[[Path], int] = available_bytes) -> None:
        """`available` tells how many bytes a pool below a directory can have."""
        self._available = available

    def num_blocks(self, root: Path, layout: PoolLayout, plan: MemoryPlan) -> int:
        """The blocks of a new pool. Raises StartupError if there is too little memory."""
        arenas = (path for one in pool_directories(root) for path in one.arenas)
        promised = sum(map(missing_bytes, arenas))
        available = max(0, self._available(root) - promised)
        block_bytes = layout.block_bytes * layout.tensor_parallel_size
        return num_blocks_for(plan, block_bytes + record_bytes(layout.block_size), available)

    def make(self, directory: PoolDirectory, header: PoolHeader, plan: MemoryPlan) -> PoolHeader:
        """Make the memory of a new pool, and return its header. Raises StartupError."""
        for rank in range(header.layout.tensor_parallel_size):
            make_file(directory.arena(rank), header.arena_bytes, plan.arena)
        return replace(header, memory_bytes=header.arena_bytes)

    def open(self, directory: PoolDirectory, header: PoolHeader, worker_id: str) -> OpenArena:
        """Map the memory, which this or another worker has made. Blocks. Raises StartupError, and
        PoolGone if the memory is lost."""
        return OpenArena(FileArena(directory.kv, header.arena_bytes))


class OtherRanks(Protocol):
    """The processes of a worker beside rank 0, with a GPU each."""

    @property
    def pids(self) -> Sequence[int]: ...

    @property
    def gpu_uuids(self) -> Sequence[str]: ...

    def make_memory(self, num_bytes: int) -> Sequence[int]:
        """Let each of the other ranks allocate so much zeroed memory on its GPU, and return the
        descriptors. Raises StartupError."""
        ...


class GpuMemory:
    """The arena of each rank is one allocation of its GPU. The first worker makes them; the keeper,
    in the block manager, gives their descriptors to the others (`services.pool.keeper`).
    Rank 0 maps its own here; the other ranks map theirs when they get the worker's lock."""

    kind: ArenaKind = "cuda"

    def __init__(self, driver: Driver, device: str, ranks: OtherRanks | None = None) -> None:
        self.gpu_uuids = (driver.uuid, *(ranks.gpu_uuids if ranks else ()))
        self._driver = driver
        self._device = device
        self._ranks = ranks
        self._made: dict[str, Sequence[int]] = {}

    def num_blocks(self, root: Path, layout: PoolLayout, plan: MemoryPlan) -> int:
        release_removed(root)  # a pool that was just removed has its memory until then
        free, _ = self._driver.free_and_total_bytes()
        size = layout.tensor_parallel_size
        return num_blocks_for(plan, size * layout.block_bytes, size * free, where=self._device)

    def make(self, directory: PoolDirectory, header: PoolHeader, plan: MemoryPlan) -> PoolHeader:
        try:
            num_bytes = allocation_bytes(self._driver, header.arena_bytes)
            with closing(CudaArena.create(self._driver, num_bytes)) as own:
                others = self._ranks.make_memory(num_bytes) if self._ranks else ()
                self._made[header.pool_id] = os.dup(own.fd), *others
        except DriverError as error:
            raise StartupError(f"no memory for a pool on {self._device}: {error}") from error
        return replace(header, kind=self.kind, gpu_uuids=self.gpu_uuids, memory_bytes=num_bytes)

    def open(self, directory: PoolDirectory, header: PoolHeader, worker_id: str) -> OpenArena:
        registration = Registration(header.pool_id, worker_id, self.gpu_uuids)
        made = self._made.pop(header.pool_id, ())
        pids = self._ranks.pids if self._ranks else ()
        try:
            kept = register(
                directory.path.parent, registration, made, is_live=directory.is_live(), pids=pids
            )
        finally:
            close_all(made)
        try:
            arena = CudaArena.open(self._driver, os.dup(kept.fd), header.memory_bytes)
            return OpenArena(arena, kept)
        except DeviceLost as error:
            kept.close()
            directory.gone.touch(0o600)
            raise PoolGone(f"the memory of pool {header.pool_id} is lost: {error}") from error
        except DriverError as error:
            kept.close()
            raise StartupError(f"cannot map the pool {header.pool_id}: {error}") from error


PoolMemory = FileMemory | GpuMemory
"""Makes and opens arenas of one kind."""
