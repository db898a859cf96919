"""How a member leaves a pool; the last one removes it. Members with PyTorch (workers) and without
(movers) leave in the same way."""

import asyncio

from blockstore.errors import StoreLost, StoreUnavailable, UnknownPool
from blockstore.store import BlockStore
from services.common.pool.directory import PoolDirectory
from services.common.pool.locks import WorkerLock, host_lock

_LEAVE_LIMIT_S = 1.0
"""How long a leaving member waits for the store. After that the block manager reaps it."""


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
