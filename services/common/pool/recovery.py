"""How a pool's ledger comes back after the block store has lost it: the pool itself is still there.

    begin     the ledger epoch in the header is raised, and the store makes the pool again, with
              everybody missing whose lock is held
    (each worker says what it holds; the block manager reaps the dead, and fences the stuck)
    finish    the store hears from the stamps what is in the blocks, and reopens the pool

Whoever notices first does each part, under the pool's recovery lock; the others find it done. If it
dies in between, somebody else goes on: every worker, and the block manager, tries.

See ADR 58.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from blockstore.errors import PoolGone, UnknownPool
from blockstore.records import Content
from blockstore.store import BlockStore
from services.common.pool.directory import PoolDirectory
from services.common.pool.header import BadHeader, PoolHeader
from services.common.pool.locks import file_lock
from services.common.pool.stamps import Stamps
from services.common.runtime.logging import get_logger

log = get_logger(__name__)


class PoolRecovery:
    """Of one pool; see `blockstore.held_blocks_mirror.Recovery`."""

    def __init__(self, directory: PoolDirectory) -> None:
        self._directory = directory

    async def begin(self, store: BlockStore, run_id: str) -> None:
        """Make the pool again unless the server, of this `run_id`, knows it as it is now.
        PoolGone: its directory is gone. Errors of the store."""
        async with self._alone() as header:
            if await _is_known(store, header):
                return
            raised = replace(header, run_id=run_id, ledger_epoch=header.ledger_epoch + 1)
            raised.replace(self._directory.header)
            missing = self._directory.live_worker_ids()
            await store.drop_pool(raised.pool_id)
            await store.recover_pool(raised.spec, raised.ledger_epoch, missing)
        log.warning(
            "ledger_lost",
            pool_id=raised.pool_id,
            ledger_epoch=raised.ledger_epoch,
            missing=list(missing),
        )

    async def finish(self, store: BlockStore) -> None:
        """Restore what is in the blocks and reopen the pool, unless somebody is missing. PoolGone:
        its directory is gone. Errors of the store."""
        async with self._alone() as header:
            stats = await store.stats(header.pool_id)
            if not stats.recovering or stats.missing_worker_ids:
                return
            # In a thread: a million stamps take a second.
            contents = await asyncio.to_thread(self._contents, header, stats.num_to_account)
            first = stats.num_accounted
            await store.restore(header.pool_id, first, contents[first:])
            await store.reopen(header.pool_id)
        num_finished = sum(content.prefix_hash is not None for content in contents)
        log.warning(
            "ledger_recovered",
            pool_id=header.pool_id,
            ledger_epoch=header.ledger_epoch,
            num_holders=stats.num_holders,
            num_finished_blocks=num_finished,
        )

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[PoolHeader]:
        try:
            async with file_lock(self._directory.recovery_lock):
                yield self._directory.read_header()
        except (FileNotFoundError, BadHeader) as error:
            raise PoolGone(f"pool {self._directory.pool_id} is gone: {error}") from error

    def _contents(self, header: PoolHeader, at_least: int) -> tuple[Content, ...]:
        stamps = Stamps(self._directory.stamps, header.num_blocks, header.layout.block_size)
        try:
            return stamps.contents(at_least)
        finally:
            stamps.close()


async def _is_known(store: BlockStore, header: PoolHeader) -> bool:
    """Whether the server has the ledger that the header speaks of, whole or recovering. An older
    one may be back from a file."""
    try:
        return (await store.stats(header.pool_id)).ledger_epoch == header.ledger_epoch
    except UnknownPool:
        return False
