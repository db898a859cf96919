"""Reaps a dead worker: commits its finished blocks, and releases all blocks that it held.

1. The watcher gets the worker's file lock, so the worker is dead and cannot write any more.
2. `reap` commits the blocks whose stamps are complete.
3. `reap` reaps the worker in the store.
4. The watcher unlinks the lock file and drops the lock.
"""

import asyncio

from blockstore.errors import NotHeld, Recovering, StaleHolder, UnknownPool, WorkerFenced
from blockstore.records import HolderInfo, PrefixHash
from blockstore.store import BlockStore
from services.block_manager.rounds import Connection
from services.pool.directory import PoolDirectory
from services.pool.header import BadHeader
from services.pool.stamps import Stamps
from services.runtime.logging import get_logger

log = get_logger(__name__)


async def reap(connection: Connection, directory: PoolDirectory, worker_id: str) -> bool:
    """Remove a dead worker from its pool. Returns False if the store does not know the pool. May be
    repeated."""
    store, pool_id = connection.store, directory.pool_id
    try:
        num_published = await _publish(store, directory, worker_id)
        num_holders = await store.reap(pool_id, worker_id)
    except UnknownPool:
        log.info("pool_unknown", pool_id=pool_id, worker_id=worker_id)
        return False
    log.warning(
        "worker_reaped",
        pool_id=pool_id,
        worker_id=worker_id,
        num_holders=num_holders,
        num_published=num_published,
    )
    return True


async def _publish(store: BlockStore, directory: PoolDirectory, worker_id: str) -> int:
    """Commit the blocks that the dead worker finished but had not committed yet, so that its
    requests find them when they are computed again. Returns how many blocks entered the prefix
    index.

    The store accepts no blocks of a fenced worker. During a recovery nothing is committed here,
    since the recovery reads all stamps.
    """
    try:
        found = await store.holders(directory.pool_id)
    except Recovering:
        return 0
    holders = {holder.holder_id: holder for holder in found if holder.worker_id == worker_id}
    if not holders:
        return 0
    num_published = 0
    # In a thread, because reading a million stamps takes half a second.
    finished = await asyncio.to_thread(_finished, directory, holders)
    for holder_id, blocks in finished.items():
        num_published += await _commit(store, directory.pool_id, holders[holder_id], blocks)
    return num_published


def _finished(
    directory: PoolDirectory, holders: dict[str, HolderInfo]
) -> dict[str, list[tuple[int, PrefixHash]]]:
    """Return the complete blocks and their prefix hashes, by the holder that wrote them, which the
    stamp names. Returns nothing if the pool's header or stamps cannot be read."""
    try:
        header = directory.read_header()
        stamps = Stamps(directory.stamps, header.num_blocks, header.layout.block_size)
    except (BadHeader, OSError, ValueError) as error:
        log.error("stamps_unreadable", pool_id=directory.pool_id, reason=str(error))
        return {}
    try:
        return {
            holder_id: [(block_id, stamps.read(block_id).prefix_hash) for block_id in block_ids]
            for holder_id, block_ids in stamps.complete_blocks(holders).items()
        }
    finally:
        stamps.close()


async def _commit(
    store: BlockStore, pool_id: str, holder: HolderInfo, blocks: list[tuple[int, PrefixHash]]
) -> int:
    """Commit the blocks one by one: a stamp does not show whether its holder still has the block,
    and the store accepts all blocks of a call or none. Returns how many it accepted."""
    num_published = 0
    for block in blocks:
        try:
            committed = await store.commit(pool_id, holder.holder_id, holder.epoch, [block])
        except NotHeld:
            continue  # the holder released this block before the worker died
        except (StaleHolder, WorkerFenced, Recovering):
            break  # a living worker claimed the holder; fenced; or the recovery reads all stamps
        num_published += sum(committed)
    return num_published
