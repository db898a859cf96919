"""Joins and leaves pools: the first worker makes a pool, the last one removes it.

Both hold the host's lock while they call the store and change files. Their order:

    join    (make the pool) -> lock the worker's file -> map the pool -> register
    leave   unmap -> leave the store -> unlink the file -> (drop the pool) -> drop the lock

If a worker dies in between, the block manager or the next worker that joins completes its work.
"""

import asyncio
import os
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from blockstore.errors import (
    BlockStoreError,
    FingerprintMismatch,
    GeometryMismatch,
    StoreLost,
    StoreUnavailable,
    UnknownPool,
)
from blockstore.records import PoolSpec
from blockstore.store import BlockStore
from services.common.errors import StartupError
from services.common.numa.policy import InterleavePolicy
from services.common.pool.allotment import WATERMARK
from services.common.pool.arena import complete_file, make_file, missing_bytes
from services.common.pool.directory import (
    PoolDirectory,
    new_directory,
    pool_directories,
    remove_incomplete_pools,
)
from services.common.pool.header import BadHeader, PoolHeader
from services.common.pool.layout import PoolLayout
from services.common.pool.locks import WorkerLock, host_lock
from services.common.pool.memory import available_bytes
from services.common.pool.names import new_pool_id
from services.common.pool.recovery import PoolRecovery
from services.common.pool.sizing import MemoryPlan, num_blocks_for
from services.common.pool.stamps import Stamps, record_bytes
from services.engine.pool import KVPool

_LEAVE_LIMIT_S = 1.0
"""How long a leaving worker waits for the store. After that the block manager reaps the worker."""

_ALLOCATION_NICENESS = 10
"""The nice value of the thread that allocates memory. Beside workers that compute on all cores it
gets a tenth of a core, and still allocates several times faster than blocks are filled."""


@dataclass(frozen=True, slots=True)
class Membership:
    """One worker's membership in one pool: its mappings, and its lock, held while it lives."""

    store: BlockStore
    directory: PoolDirectory
    header: PoolHeader
    worker_id: str
    lock: WorkerLock
    pool: KVPool
    stamps: Stamps

    @property
    def spec(self) -> PoolSpec:
        return self.header.spec

    async def complete_memory(self) -> None:
        """Allocate the memory of the pool that `join` did not allocate, while the worker serves.

        Every worker of the pool does this, so that the death of one does not stop it.
        StartupError: the memory is no longer available.
        """
        stopped = threading.Event()
        # Not asyncio's pool: the nice value belongs to a thread, and can only rise.
        thread = ThreadPoolExecutor(1, "arena", os.nice, (_ALLOCATION_NICENESS,))
        loop = asyncio.get_running_loop()
        try:
            for path in (self.directory.stamps, self.directory.kv):
                await loop.run_in_executor(thread, complete_file, path, stopped.is_set)
        finally:
            stopped.set()
            thread.shutdown(wait=False)

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
        try:
            async with asyncio.timeout(_LEAVE_LIMIT_S), host_lock(self.directory.path.parent):
                await self._deregister()
        except TimeoutError as error:
            raise StoreUnavailable(f"{self.worker_id} cannot leave its pool now") from error
        finally:
            self.lock.close()

    def close(self) -> None:
        """Unmap the pool and drop the lock without a call to the store; the block manager then
        reaps the worker. No thread of the worker may write any more. May be called again."""
        self.pool.close()
        self.stamps.close()
        self.lock.close()

    async def _deregister(self) -> None:
        pool_id = self.spec.pool_id
        try:
            await self.store.leave(pool_id, self.worker_id)
            ledger_is_there = True
        except (UnknownPool, StoreLost):
            ledger_is_there = False
        # The worker holds nothing, so the block manager need not reap it.
        self.lock.unlink()
        if not self.directory.is_live():
            if ledger_is_there:
                await self.store.drop_pool(pool_id)
            await asyncio.to_thread(self.directory.remove)


async def join(
    store: BlockStore,
    run_id: str,
    root: Path,
    layout: PoolLayout,
    worker_id: str,
    plan: MemoryPlan,
    watermark: float = WATERMARK,
    colder_of: str | None = None,
) -> Membership:
    """Join the live pool of these weights, or make it.

    `run_id`: of the store. If the store has lost the ledger of a live pool, the join starts its
    recovery. `colder_of`: the id of the pool whose swap pool is to be joined; None: an own pool.

    StartupError: a live pool of the same weights has another geometry, or there is too little
    memory for a new pool. Also raises the store's errors. A join that fails leaves nothing behind.
    """
    async with host_lock(root):
        await _remove_dead(store, root)
        found = _find_live(root, layout, colder_of)
        if found is not None:
            return await _enter(store, run_id, found, worker_id)
        made = await asyncio.to_thread(_make, root, layout, run_id, plan, watermark, colder_of)
        try:
            await store.register_pool(made.read_header().spec)
            return await _enter(store, run_id, made, worker_id)
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
    """Remove the pools without a live worker: the content of their blocks is not trusted."""
    remove_incomplete_pools(root)
    for directory in pool_directories(root):
        if not directory.is_live():
            await store.drop_pool(directory.pool_id)
            await asyncio.to_thread(directory.remove)


def _find_live(root: Path, layout: PoolLayout, colder_of: str | None) -> PoolDirectory | None:
    """The live pool of these weights, if there is one. StartupError: it has another geometry."""
    wanted = layout.fingerprint, colder_of
    for directory in pool_directories(root):
        try:
            header = directory.read_header()
        except BadHeader:
            continue  # a live pool of another version of Quire
        if (header.layout.fingerprint, header.colder_of) == wanted:
            if header.layout != layout:
                raise StartupError(
                    f"pool {header.pool_id} has the same weights but another geometry: "
                    f"{header.layout}, this worker: {layout}"
                )
            return directory
    return None


def _make(
    root: Path,
    layout: PoolLayout,
    run_id: str,
    plan: MemoryPlan,
    watermark: float,
    colder_of: str | None,
) -> PoolDirectory:
    """Make a pool under a new id. Only the first part of its memory is allocated;
    `Membership.complete_memory` allocates the rest."""
    stamp_bytes = record_bytes(layout.block_size)
    promised = sum(missing_bytes(directory.kv) for directory in pool_directories(root))
    available = max(0, available_bytes(root) - promised)
    num_blocks = num_blocks_for(plan, layout.block_bytes + stamp_bytes, available)
    header = PoolHeader(
        pool_id=new_pool_id(layout.model),
        run_id=run_id,
        layout=layout,
        num_blocks=num_blocks,
        watermark_blocks=int(watermark * num_blocks),
        colder_of=colder_of,
    )
    with new_directory(root, header.pool_id) as directory:
        make_file(directory.kv, header.arena_bytes, plan.arena)
        make_file(directory.stamps, num_blocks * stamp_bytes)
        header.write(directory.header)
    return PoolDirectory(root / header.pool_id)


async def _enter(
    store: BlockStore, run_id: str, directory: PoolDirectory, worker_id: str
) -> Membership:
    """Lock, map, register. In this order, a worker that the store knows always has a lock, so the
    block manager notices its death."""
    header, recovery = directory.read_header(), PoolRecovery(directory)
    with ExitStack() as undo:
        lock = WorkerLock.create(directory.lock_path(worker_id))
        undo.callback(lock.close)
        undo.callback(lock.unlink)
        pool = KVPool(directory.kv, header.layout, header.num_blocks)
        undo.callback(pool.close)
        stamps = Stamps(directory.stamps, header.num_blocks, header.layout.block_size)
        undo.callback(stamps.close)
        try:
            await recovery.begin(store, run_id)
            own = partial(_stamp_owner, stamps, lock)
            await store.register_worker(header.spec, worker_id, recovery, own)
        except (GeometryMismatch, FingerprintMismatch) as error:
            raise StartupError(f"pool {header.pool_id} refuses {worker_id}: {error}") from error
        undo.pop_all()
    return Membership(store, directory, header, worker_id, lock, pool, stamps)


def _stamp_owner(
    stamps: Stamps, lock: WorkerLock, holder_id: str, block_ids: Sequence[int]
) -> None:
    """Stamp new blocks with their holder. Not if the worker was marked as fenced or has left the
    pool: other workers may have these blocks by then, and this one writes into none of them."""
    if not stamps.is_closed and not lock.is_revoked:
        stamps.mark_owned(block_ids, holder_id)
