"""Writes to the store about the holders of a worker: commit, give back, release."""

import asyncio
from collections.abc import Sequence

from blockstore.errors import StaleHolder
from blockstore.records import PrefixHash
from blockstore.store import BlockStore
from services.protocol.ticket import Ticket
from services.worker.requests.events import PREEMPTED, Ending, Session, report
from services.worker.requests.store_writer import StoreWriter

_RETURNING_WAITER_S = 1.0
"""How long the store keeps the returning waiter of a preempted request. The request is back a few
messages later, or it has ended meanwhile."""


class HolderWrites:
    """Writes about the holders that tickets name. The methods that are not coroutines queue their
    write at once, so writes about one holder keep the order of the calls."""

    def __init__(self, store: BlockStore, pool_id: str, writer: StoreWriter) -> None:
        self._store = store
        self._pool_id = pool_id
        self._writer = writer
        self.num_returning_waiters = 0

    async def commit(self, ticket: Ticket, completed: Sequence[tuple[int, PrefixHash]]) -> None:
        await self._store.commit(self._pool_id, ticket.holder_id, ticket.holder_epoch, completed)

    def give_back(self, ticket: Ticket, block_ids: Sequence[int]) -> None:
        """Give back blocks that a group no longer uses, after its earlier commits."""
        if block_ids:
            holder = self._pool_id, ticket.holder_id, ticket.holder_epoch
            self._writer.put(lambda: self._store.give_back(*holder, block_ids))

    def retract(self, blocks: Sequence[tuple[int, PrefixHash]]) -> None:
        """Take full blocks out of the prefix index."""

        async def retract() -> None:
            for block_id, prefix_hash in blocks:
                await self._store.retract(self._pool_id, block_id, prefix_hash)

        self._writer.put(retract)

    def end(self, session: Session, ticket: Ticket, ending: Ending) -> None:
        """Release a ticket whose group has left the engine, then report its early end. The group's
        commits are queued already, so they precede the release."""

        async def end() -> None:
            await self.release(ticket, ending)
            report(session, ticket, ending)

        self._writer.put(end)

    async def release(self, ticket: Ticket, ending: Ending) -> None:
        """Release the blocks of a ticket. A preempted request leaves a returning waiter until it is
        back, at most for `_RETURNING_WAITER_S`. Raises StaleHolder."""
        holder_id, is_preempted = ticket.holder_id, ending is PREEMPTED
        await self._store.release(self._pool_id, holder_id, ticket.holder_epoch, is_preempted)
        if is_preempted:
            self.num_returning_waiters += 1
            loop = asyncio.get_running_loop()
            loop.call_later(
                _RETURNING_WAITER_S, self._writer.put, lambda: self._withdraw(holder_id)
            )

    async def release_detached(self, session: Session, ticket: Ticket, ending: Ending) -> None:
        """Release a detached ticket and report `ending`, unless a worker has claimed the ticket."""
        swapped = ticket.swapped
        try:
            if swapped is None:
                await self.release(ticket, ending)
            else:
                holder = swapped.pool_id, swapped.holder_id, swapped.holder_epoch
                await self._store.release(*holder)
        except StaleHolder:
            return
        report(session, ticket, ending)

    async def _withdraw(self, holder_id: str) -> None:
        await self._store.withdraw(self._pool_id, holder_id)
        self.num_returning_waiters -= 1
