"""Joins and leaves pools: the first worker makes a pool, the last one removes it.

Both hold the host's lock while they call the store and change files. Their order:

    join    (make the pool) -> lock the worker's file -> map the pool -> register
    leave   unmap -> leave the store -> unlink the file -> (drop the pool) -> drop the lock

On a GPU the worker registers at the keeper before it locks its file: a worker that has a lock and
no record of its process is never reaped. A pool on a GPU without a live worker can be joined while
the keeper has its memory.

If a worker dies in between, the block manager or the next worker that joins completes its work.
"""

import asyncio
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from blockstore.errors import BlockStoreError, PoolGone
from blockstore.records import PoolSpec
from blockstore.store import FUNCTION_LIBRARY, BlockStore
from services.engine.pool import KVPool
from services.pool.allotment import WATERMARK
from services.pool.arena import complete_file, make_file
from services.pool.directory import (
    PoolDirectory,
    new_directory,
    pool_directories,
    remove_incomplete_pools,
)
from services.pool.header import BadHeader, PoolHeader
from services.pool.keeper import KeptMemory, release_removed
from services.pool.layout import PoolLayout
from services.pool.locks import WorkerLock, host_lock
from services.pool.members import leave_pool, register_member
from services.pool.names import new_pool_id
from services.pool.sizing import MemoryPlan
from services.pool.stamps import Stamps, record_bytes
from services.runtime.errors import StartupError
from services.runtime.numa.policy import InterleavePolicy
from services.runtime.ticks import until_tick
from services.worker.pool_memory import FileMemory, PoolMemory

_ALLOCATION_NICENESS = 10
"""The nice value of the thread that allocates memory. Beside workers that compute on all cores it
gets a tenth of a core, and still allocates several times faster than blocks are filled."""

_LOSS_CHECK_S = 0.5


@dataclass(frozen=True, slots=True)
class MappedPool:
    """One worker's mappings of one pool."""

    store: BlockStore
    header: PoolHeader
    worker_id: str
    pool: KVPool
    stamps: Stamps

    @property
    def spec(self) -> PoolSpec:
        return self.header.spec


@dataclass(frozen=True, slots=True)
class Membership(MappedPool):
    """One worker's membership in a pool that other processes see: its mappings, and its lock, held
    while it lives."""

    directory: PoolDirectory
    lock: WorkerLock
    kept: KeptMemory | None = None
    """The worker's registration at the keeper, if the pool is on a GPU."""

    async def complete_memory(self) -> None:
        """Allocate the memory of the pool that `join` did not allocate, while the worker serves.

        Every worker of the pool does this, so that the death of one does not stop it. Raises
        StartupError if the memory is no longer available.
        """
        stopped = threading.Event()
        # Not asyncio's pool: the nice value belongs to a thread, and can only rise.
        thread = ThreadPoolExecutor(1, "arena", os.nice, (_ALLOCATION_NICENESS,))
        paths = [self.directory.stamps]
        if self.header.kind == "file":
            paths += self.directory.arenas

        def complete() -> None:
            for path in paths:
                complete_file(path, stopped.is_set)

        work = thread.submit(complete)
        try:
            await asyncio.wrap_future(work)
        finally:
            stopped.set()
            thread.shutdown(wait=False, cancel_futures=True)

    async def watch_memory(self) -> None:
        """On a GPU, stay registered at the keeper. Raises PoolGone if a worker of the pool has
        found that the GPU's memory is lost."""
        if self.kept is None:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.kept.keep())
            while True:
                if self.directory.gone.exists():
                    raise PoolGone(f"pool {self.header.pool_id} is lost, with its GPU's memory")
                await asyncio.sleep(until_tick(_LOSS_CHECK_S))

    async def leave(self) -> None:
        """Leave the pool; the last worker removes it. The worker must hold nothing, and no step may
        be in flight. No error if it has left already.

        Raises WorkerNotEmpty, StoreUnavailable or StoreLost. The lock is dropped in any case, so
        the block manager does what is left to do.
        """
        if self.lock.is_unlinked:
            return
        self.pool.close()
        self.stamps.close()
        is_removed = await leave_pool(self.store, self.directory, self.worker_id, self.lock)
        if is_removed and self.kept is not None:
            await asyncio.to_thread(release_removed, self.directory.path.parent)

    def close(self) -> None:
        """Unmap the pool and drop the lock without a call to the store; the block manager then
        reaps the worker. No thread of the worker may write any more. May be called again."""
        if self.kept is not None and not self.lock.is_unlinked:
            # An error: the block manager then waits for the end of this process.
            with suppress(RuntimeError, OSError):
                self.pool.wait_until_idle()
                self.directory.finished_path(self.worker_id).touch(0o600)
        self.pool.close()
        self.stamps.close()
        self.lock.close()
        if self.kept is not None:
            self.kept.close()


async def join(
    store: BlockStore,
    run_id: str,
    root: Path,
    layout: PoolLayout,
    worker_id: str,
    plan: MemoryPlan,
    watermark: float = WATERMARK,
    colder_of: str | None = None,
    memory: PoolMemory | None = None,
) -> Membership:
    """Join the live pool of these weights, or make it.

    `run_id` is the store's. If the store has lost the ledger of a live pool, the join starts its
    recovery. With `colder_of`, the id of a pool, the worker joins the swap pool of that pool.
    `memory` has the pool; None is a file.

    Raises StartupError if a live pool of the same weights has another geometry or is elsewhere, or
    if there is too little memory for a new pool; PoolGone if the pool's GPU has lost it; and the
    store's errors. A join that fails leaves nothing behind.
    """
    wanted = _WantedPool(root, layout, plan, watermark, colder_of, memory or FileMemory())
    async with host_lock(root):
        await _remove_dead(store, root)
        found = wanted.find()
        if found is not None:
            try:
                return await _enter(store, run_id, found, worker_id, wanted.memory)
            except PoolGone:
                if found.is_live():
                    raise
                await _remove(store, found)
        made = await asyncio.to_thread(wanted.make, run_id)
        try:
            await store.register_pool(made.read_header().spec)
            return await _enter(store, run_id, made, worker_id, wanted.memory)
        except BaseException:
            await asyncio.to_thread(made.remove)
            with suppress(BlockStoreError):
                await store.drop_pool(made.pool_id)
            raise


async def join_swap_pool(
    own: Membership, num_bytes: int, arena: InterleavePolicy | None = None
) -> Membership:
    """Join the swap pool of the pool of `own`, or make it with `num_bytes`. Like any pool it has a
    directory, locks and a ledger, and its last worker removes it. Raises as `join` does."""
    root, header = own.directory.path.parent, own.header
    plan = MemoryPlan(pool_bytes=num_bytes, arena=arena)
    layout = replace(header.layout, model=f"{header.layout.model}-swap")
    try:
        return await join(
            own.store,
            header.run_id,
            root,
            layout,
            own.worker_id,
            plan,
            watermark=0.0,
            colder_of=header.pool_id,
        )
    except StartupError as error:
        raise StartupError(f"swap memory: {error}") from error


async def _remove_dead(store: BlockStore, root: Path) -> None:
    """Remove the pools without a live worker whose memory nobody keeps: files, and what a lost GPU
    had. The content of their blocks is not trusted."""
    remove_incomplete_pools(root)
    for directory in pool_directories(root):
        if not directory.is_live() and (directory.is_file_pool or directory.gone.exists()):
            await _remove(store, directory)


async def _remove(store: BlockStore, directory: PoolDirectory) -> None:
    await store.drop_pool(directory.pool_id)
    await asyncio.to_thread(directory.remove)


@dataclass(frozen=True, slots=True)
class _WantedPool:
    """The pool that a worker joins or makes; see `join`."""

    root: Path
    layout: PoolLayout
    plan: MemoryPlan
    watermark: float
    colder_of: str | None
    memory: PoolMemory

    def find(self) -> PoolDirectory | None:
        """The pool of this model and these weights that can be joined, if there is one. Two models
        with the same weights have a pool each. Raises StartupError if the pool has another
        geometry, or is in other memory."""
        wanted = self.layout.model, self.layout.fingerprint, self.colder_of
        for directory in pool_directories(self.root):
            try:
                header = directory.read_header()
            except BadHeader:
                continue  # a live pool of another version of Quire
            found = header.layout.model, header.layout.fingerprint, header.colder_of
            if header.library != FUNCTION_LIBRARY:
                continue  # its workers are of the version before, and leave during an upgrade
            if found == wanted and not directory.gone.exists():
                self._check(header)
                return directory
            if header.colder_of is None:
                self._check_ranks(header)
        return None

    def _check(self, header: PoolHeader) -> None:
        """Raises StartupError if the pool of these weights is not for this worker's device."""
        if (header.kind, header.gpu_uuids) != (self.memory.kind, self.memory.gpu_uuids):
            raise StartupError(
                f"pool {header.pool_id} is in {_place(header)}, and this worker's device has pools "
                f"in {_place(self.memory)}: give all workers of a pool the same device"
            )
        if header.layout != self.layout:
            raise StartupError(
                f"pool {header.pool_id} has the same weights but another geometry: "
                f"{header.layout}, this worker: {self.layout}"
            )

    def _check_ranks(self, header: PoolHeader) -> None:
        """Raises StartupError if a pool of the model is for workers of another number of ranks."""
        size, own_size = header.layout.tensor_parallel_size, self.layout.tensor_parallel_size
        if header.layout.model == self.layout.model and size != own_size:
            raise StartupError(
                f"pool {header.pool_id} of model {self.layout.model!r} has workers of {size} "
                f"ranks, and this worker has tensor_parallel_size {own_size}: all workers of a "
                "pool need the same"
            )

    def make(self, run_id: str) -> PoolDirectory:
        """Make a pool under a new id. Only the first part of its files is allocated;
        `Membership.complete_memory` allocates the rest."""
        num_blocks = self.memory.num_blocks(self.root, self.layout, self.plan)
        header = PoolHeader(
            pool_id=new_pool_id(self.layout.model),
            run_id=run_id,
            layout=self.layout,
            num_blocks=num_blocks,
            watermark_blocks=int(self.watermark * num_blocks),
            colder_of=self.colder_of,
        )
        with new_directory(self.root, header.pool_id) as directory:
            header = self.memory.make(directory, header, self.plan)
            make_file(directory.stamps, num_blocks * record_bytes(self.layout.block_size))
            header.write(directory.header)
        return PoolDirectory(self.root / header.pool_id)


def _place(pool: PoolHeader | PoolMemory) -> str:
    uuids = ", ".join(pool.gpu_uuids)
    return f"the memory of {uuids}" if uuids else "a file of the host's memory"


async def _enter(
    store: BlockStore, run_id: str, directory: PoolDirectory, worker_id: str, memory: PoolMemory
) -> Membership:
    """Map, lock, register. In this order, a worker that the store knows always has a lock, so the
    block manager notices its death."""
    header = directory.read_header()
    with ExitStack() as undo:
        undo.callback(directory.process_path(worker_id).unlink, missing_ok=True)
        opened = await asyncio.to_thread(memory.open, directory, header, worker_id)
        undo.callback(opened.arena.close)
        if opened.kept is not None:
            undo.callback(opened.kept.close)
        lock = WorkerLock.create(directory.lock_path(worker_id))
        undo.callback(lock.close)
        undo.callback(lock.unlink)
        pool = KVPool(opened.arena, header.layout, header.num_blocks)
        undo.callback(pool.close)
        stamps = Stamps(directory.stamps, header.num_blocks, header.layout.block_size)
        undo.callback(stamps.close)
        await register_member(store, run_id, directory, header, worker_id, stamps, lock)
        undo.pop_all()
    return Membership(store, header, worker_id, pool, stamps, directory, lock, opened.kept)
