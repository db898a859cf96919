"""Members register at a pool and leave it; the last one removes it. Members with PyTorch (workers)
and without (movers) do both in the same way."""

import asyncio
from collections.abc import Sequence

from blockstore.errors import (
    FingerprintMismatch,
    GeometryMismatch,
    StoreLost,
    StoreUnavailable,
    UnknownPool,
)
from blockstore.store import BlockStore
from services.pool.directory import PoolDirectory
from services.pool.header import PoolHeader
from services.pool.locks import WorkerLock, host_lock
from services.pool.recovery import PoolRecovery
from services.pool.stamps import Stamps
from services.runtime.errors import StartupError

_LEAVE_LIMIT_S = 1.0
"""How long a leaving member waits for the store. After that the block manager reaps it."""


async def register_member(
    store: BlockStore,
    run_id: str,
    directory: PoolDirectory,
    header: PoolHeader,
    member_id: str,
    stamps: Stamps,
    lock: WorkerLock,
) -> None:
    """Register a member that has locked its file. If the store, whose run id is `run_id`, has lost
    the ledger, its recovery begins. Raises StartupError if the pool refuses the member. Also raises
    the store's errors and PoolGone."""

    def own(holder_id: str, block_ids: Sequence[int]) -> None:
        """Stamp new blocks with their holder. Not if the member was marked as fenced or has left
        the pool: other members may have these blocks by then, and this one writes into none."""
        if not stamps.is_closed and not lock.is_revoked:
            stamps.mark_owned(block_ids, holder_id)

    recovery = PoolRecovery(directory)
    try:
        await recovery.begin(store, run_id)
        await store.register_worker(header.spec, member_id, recovery, own)
    except (GeometryMismatch, FingerprintMismatch) as error:
        raise StartupError(f"pool {header.pool_id} refuses {member_id}: {error}") from error


async def leave_pool(
    store: BlockStore, directory: PoolDirectory, worker_id: str, lock: WorkerLock
) -> bool:
    """Leave the pool, and remove it if no other member lives: then the answer is True. The member
    holds nothing and has unmapped the pool; its lock is dropped in any case. Raises WorkerNotEmpty,
    StoreUnavailable or StoreLost."""
    try:
        async with asyncio.timeout(_LEAVE_LIMIT_S), host_lock(directory.path.parent):
            return await _leave(store, directory, worker_id, lock)
    except TimeoutError as error:
        raise StoreUnavailable(f"{worker_id} cannot leave its pool now") from error
    finally:
        lock.close()


async def _leave(
    store: BlockStore, directory: PoolDirectory, worker_id: str, lock: WorkerLock
) -> bool:
    try:
        await store.leave(directory.pool_id, worker_id)
        ledger_is_there = True
    except (UnknownPool, StoreLost):
        ledger_is_there = False
    # The member holds nothing, so the block manager need not reap it.
    lock.unlink()
    directory.process_path(worker_id).unlink(missing_ok=True)
    if directory.is_live():
        return False
    if ledger_is_there:
        await store.drop_pool(directory.pool_id)
    await asyncio.to_thread(directory.remove)
    return True
