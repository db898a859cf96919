"""Rebuilds a pool's ledger after the block store has lost it, while the pool itself still exists.

    begin     raise the ledger epoch in the header, and make the pool again in the store; every
              worker whose lock is held counts as missing
    (each worker reports what it holds; the block manager reaps dead workers and fences stuck ones)
    finish    restore the content of the blocks from the stamps, and reopen the pool

All workers and the block manager try both parts. The first one does the work under the pool's
recovery lock, the others find it done. If that process dies meanwhile, another one continues.

See ADR 58.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from blockstore.errors import PoolGone, UnknownPool
from blockstore.records import Content
from blockstore.store import BlockStore
from quire.files import replace_file
from services.pool.directory import PoolDirectory
from services.pool.header import BadHeader, PoolHeader
from services.pool.locks import file_lock, is_held
from services.pool.stamps import Stamps
from services.runtime.logging import get_logger

log = get_logger(__name__)


class PoolRecovery:
    """Recovers the ledger of one pool; implements `blockstore.store.Recovery`."""

    def __init__(self, directory: PoolDirectory) -> None:
        self._directory = directory

    async def begin(self, store: BlockStore, run_id: str) -> None:
        """Make the pool again, unless the server, whose run id is `run_id`, has its current ledger.

        Raises PoolGone if the pool's directory is gone, and the store's errors.
        """
        async with self._locked_header() as header:
            if await _is_known(store, header):
                return
            raised = replace(header, run_id=run_id, ledger_epoch=header.ledger_epoch + 1)
            replace_file(self._directory.header, raised.dump())
            missing = self._may_be_writing(header)
            await store.drop_pool(raised.pool_id)
            await store.recover_pool(raised.spec, raised.ledger_epoch, missing)
        log.warning(
            "ledger_lost",
            pool_id=raised.pool_id,
            ledger_epoch=raised.ledger_epoch,
            missing=list(missing),
        )

    async def finish(self, store: BlockStore) -> None:
        """Restore the content of the blocks and reopen the pool, unless a worker is still missing.

        Raises PoolGone if the pool's directory is gone, and the store's errors.
        """
        async with self._locked_header() as header:
            stats = await store.stats(header.pool_id)
            if not stats.recovering or stats.missing_worker_ids:
                return
            # In a thread, because a million stamps take a second.
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

    def _may_be_writing(self, header: PoolHeader) -> tuple[str, ...]:
        """The workers whose locks are held. A GPU or a network adapter may write for a member that
        has lost its lock: of pools on GPUs all members, and all movers, that the block manager has
        not reaped."""
        directory = self._directory
        return tuple(
            worker_id
            for worker_id in directory.worker_ids()
            if header.kind != "file"
            or directory.process_path(worker_id).exists()
            or is_held(directory.lock_path(worker_id))
        )

    @asynccontextmanager
    async def _locked_header(self) -> AsyncIterator[PoolHeader]:
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
    """Whether the server has the ledger of the header's epoch, complete or recovering. A server
    that restarted from a file may have an older one."""
    try:
        return (await store.stats(header.pool_id)).ledger_epoch == header.ledger_epoch
    except UnknownPool:
        return False
