"""Where the arena of a pool is: in a file of the host's memory, or in the memory of a GPU."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from blockstore.errors import PoolGone
from kvops.cuda.vmm import DeviceLost, Driver, DriverError, allocation_bytes
from services.common.errors import StartupError
from services.common.pool.arena import make_file, missing_bytes
from services.common.pool.directory import PoolDirectory, pool_directories
from services.common.pool.header import ArenaKind, PoolHeader
from services.common.pool.keeper import KeptMemory, Registration, register, release_removed
from services.common.pool.layout import PoolLayout
from services.common.pool.memory import available_bytes
from services.common.pool.sizing import MemoryPlan, num_blocks_for
from services.common.pool.stamps import record_bytes
from services.engine.pool import Arena, CudaArena, FileArena


@dataclass(frozen=True, slots=True)
class OpenArena:
    """A mapped arena, and the worker's registration at the keeper if it is on a GPU."""

    arena: Arena
    kept: KeptMemory | None = None


class PoolMemory(Protocol):
    """Makes and opens arenas of one kind. `gpu_uuid`: empty for files."""

    @property
    def kind(self) -> ArenaKind: ...

    @property
    def gpu_uuid(self) -> str: ...

    def num_blocks(self, root: Path, layout: PoolLayout, plan: MemoryPlan) -> int:
        """The blocks of a new pool. StartupError: there is too little memory."""
        ...

    def make(self, directory: PoolDirectory, header: PoolHeader, plan: MemoryPlan) -> PoolHeader:
        """Make the memory of a new pool; returns its header. StartupError."""
        ...

    def open(self, directory: PoolDirectory, header: PoolHeader, worker_id: str) -> OpenArena:
        """Map the memory, which this or another worker has made. Blocks. Raises StartupError, and
        PoolGone if the memory is lost."""
        ...


class FileMemory:
    """The arena is the file `kv` of the pool's directory."""

    kind: ArenaKind = "file"
    gpu_uuid = ""

    def num_blocks(self, root: Path, layout: PoolLayout, plan: MemoryPlan) -> int:
        arenas = (path for one in pool_directories(root) for path in one.arenas)
        promised = sum(map(missing_bytes, arenas))
        available = max(0, available_bytes(root) - promised)
        block_bytes = layout.block_bytes * layout.tensor_parallel_size
        return num_blocks_for(plan, block_bytes + record_bytes(layout.block_size), available)

    def make(self, directory: PoolDirectory, header: PoolHeader, plan: MemoryPlan) -> PoolHeader:
        for rank in range(header.layout.tensor_parallel_size):
            make_file(directory.arena(rank), header.arena_bytes, plan.arena)
        return replace(header, memory_bytes=header.arena_bytes)

    def open(self, directory: PoolDirectory, header: PoolHeader, worker_id: str) -> OpenArena:
        return OpenArena(FileArena(directory.kv, header.arena_bytes))


class GpuMemory:
    """The arena is one allocation of a GPU. The first worker makes it; the keeper, in the block
    manager, gives its descriptor to the others (`services.common.pool.keeper`)."""

    kind: ArenaKind = "cuda"

    def __init__(self, driver: Driver, device: str) -> None:
        self.gpu_uuid = driver.uuid
        self._driver = driver
        self._device = device
        self._made: dict[str, CudaArena] = {}

    def num_blocks(self, root: Path, layout: PoolLayout, plan: MemoryPlan) -> int:
        release_removed(root)  # a pool that was just removed has its memory until then
        free, _ = self._driver.free_and_total_bytes()
        return num_blocks_for(plan, layout.block_bytes, free, where=self._device)

    def make(self, directory: PoolDirectory, header: PoolHeader, plan: MemoryPlan) -> PoolHeader:
        try:
            num_bytes = allocation_bytes(self._driver, header.arena_bytes)
            self._made[header.pool_id] = CudaArena.create(self._driver, num_bytes)
        except DriverError as error:
            raise StartupError(f"no memory for a pool on {self._device}: {error}") from error
        return replace(header, kind=self.kind, gpu_uuid=self.gpu_uuid, memory_bytes=num_bytes)

    def open(self, directory: PoolDirectory, header: PoolHeader, worker_id: str) -> OpenArena:
        made = self._made.pop(header.pool_id, None)
        registration = Registration(header.pool_id, worker_id, self.gpu_uuid)
        kept = register(
            directory.path.parent,
            registration,
            made.fd if made else None,
            is_live=directory.is_live(),
        )
        try:
            arena = made or CudaArena.open(self._driver, os.dup(kept.fd), header.memory_bytes)
            return OpenArena(arena, kept)
        except DeviceLost as error:
            kept.close()
            directory.gone.touch(0o600)
            raise PoolGone(f"the memory of pool {header.pool_id} is lost: {error}") from error
        except DriverError as error:
            kept.close()
            raise StartupError(f"cannot map the pool {header.pool_id}: {error}") from error
