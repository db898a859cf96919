"""What is done for a dead worker: its finished blocks are published, all that it held is released.

the lock is had (so it is dead, and none of its writes can follow)
-> publish complete stamps -> reap -> unlink the lock file -> let go of the lock
"""

import asyncio

from blockstore.errors import NotHeld, Recovering, StaleHolder, UnknownPool, WorkerFenced
from blockstore.records import HolderInfo, PrefixHash
from blockstore.store import BlockStore
from services.block_manager.link import Connection
from services.common.pool.directory import PoolDirectory
from services.common.pool.header import BadHeader
from services.common.pool.stamps import Stamps
from services.common.runtime.logging import get_logger

log = get_logger(__name__)


async def reap(connection: Connection, directory: PoolDirectory, worker_id: str) -> bool:
    """Take a dead worker off its pool; whether the store knew the pool. Again: no error."""
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
    """Put blocks that the dead worker had finished but not yet committed into the prefix index, for
    whoever computes these prompts again; how many that were.

    A fenced worker's blocks are not published: the store takes nothing more from it. In a recovery
    all stamps are read anyway.
    """
    try:
        found = await store.holders(directory.pool_id)
    except Recovering:
        return 0
    holders = {holder.holder_id: holder for holder in found if holder.worker_id == worker_id}
    if not holders:
        return 0
    num_published = 0
    # In a thread: a million stamps take half a second to read.
    finished = await asyncio.to_thread(_finished, directory, holders)
    for holder_id, blocks in finished.items():
        num_published += await _commit(store, directory.pool_id, holders[holder_id], blocks)
    return num_published


def _finished(
    directory: PoolDirectory, holders: dict[str, HolderInfo]
) -> dict[str, list[tuple[int, PrefixHash]]]:
    """Blocks and their hashes, by the holder that wrote them (its token is in the stamp)."""
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
    """One by one, since a stamp does not say whether its holder still has the block, and the store
    takes all of a call or nothing."""
    num_published = 0
    for block in blocks:
        try:
            committed = await store.commit(pool_id, holder.holder_id, holder.epoch, [block])
        except NotHeld:
            continue  # Given back before.
        except (StaleHolder, WorkerFenced, Recovering):
            break  # Claimed by a living worker meanwhile; fenced; or all stamps are read anyway.
        num_published += sum(committed)
    return num_published
