"""Gets blocks for running sequences before they need them, so that no step waits for the store."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from blockstore.errors import OutOfBlocks, StaleHolder
from blockstore.records import Grown, Growth
from blockstore.store import BlockStore

_RETRY_S = 0.05


class BlockExtender:
    """Asks the store for the blocks of all holders together. A holder that is refused asks again
    when blocks become free, at the latest after `_RETRY_S`.

    `on_blocks(holder_id, block_ids)` gets new blocks, in acquisition order.
    `on_demands(holder_ids)` gets the holders of this worker that the store wants preempted.
    """

    def __init__(
        self,
        store: BlockStore,
        pool_id: str,
        worker_id: str,
        on_blocks: Callable[[str, tuple[int, ...]], None],
        on_demands: Callable[[Sequence[str]], None],
    ) -> None:
        self._store = store
        self._pool_id = pool_id
        self._worker_id = worker_id
        self._on_blocks = on_blocks
        self._on_demands = on_demands
        self._holders: dict[str, Growth] = {}
        self._wanting: set[str] = set()
        self._wanted = asyncio.Event()

    def add(self, holder_id: str, epoch: int, num_blocks: int) -> None:
        """Add a holder. `num_blocks`: how many blocks it has acquired so far, including those that
        it gave back."""
        self._holders[holder_id] = Growth(holder_id, epoch, have=num_blocks, total=num_blocks)

    def want(self, holder_id: str, total: int) -> None:
        """Ask for blocks until the holder has acquired `total`; no effect if it has asked for as
        many."""
        growth = self._holders[holder_id]
        if total > growth.total:
            self._holders[holder_id] = replace(growth, total=total)
            self._wanting.add(holder_id)
            self._wanted.set()

    def remove(self, holder_id: str) -> None:
        """Remove a holder, before its release. The answer to a request in flight is dropped; the
        release returns the blocks in it."""
        self._holders.pop(holder_id, None)
        self._wanting.discard(holder_id)

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            if self._wanting and await self._short():
                await self._store.wait_for_room(self._pool_id, _RETRY_S)
                self._wanted.set()

    async def _short(self) -> bool:
        """Ask for the blocks of all holders that want some; return whether the pool had too few."""
        growths = [self._holders[holder_id] for holder_id in self._wanting]
        extension = await self._store.extend(self._pool_id, self._worker_id, growths)
        short = False
        for growth, grown in zip(growths, extension.grown, strict=True):
            if self._is_ours(growth):
                short |= grown.error == OutOfBlocks.code
                self._take(growth, grown)
        self._on_demands(extension.demands)
        return short

    def _is_ours(self, growth: Growth) -> bool:
        """Whether an answer is still of use: the holder may have been removed since the call, and
        added again at another epoch."""
        holder = self._holders.get(growth.holder_id)
        return holder is not None and holder.epoch == growth.epoch

    def _take(self, asked: Growth, grown: Grown) -> None:
        if grown.error == StaleHolder.code:
            raise StaleHolder(
                f"{asked.holder_id} is running, and not this worker's at {asked.epoch}"
            )
        if grown.error:
            return
        wanted = self._holders[asked.holder_id]
        self._holders[asked.holder_id] = replace(wanted, have=asked.total)
        if wanted.total == asked.total:
            self._wanting.discard(asked.holder_id)
        self._on_blocks(asked.holder_id, grown.block_ids)
