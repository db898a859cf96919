"""Gets blocks for running sequences before they need them, so that no step waits for the store."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

from blockstore.errors import OutOfBlocks, StaleHolder
from blockstore.records import Grown, Growth
from services.engine.messages import AddBlocks
from services.worker.pool_engine import PoolEngine

_RETRY_S = 0.05


class BlockExtender:
    """Asks the store for the blocks of all holders of `worker` together, and sends new blocks to
    its engine. A refused holder asks again when blocks become free, at most `_RETRY_S` later.
    `preempt` gets the holders of this worker that the store wants to be preempted."""

    def __init__(self, worker: PoolEngine, preempt: Callable[[Sequence[str]], None]) -> None:
        self._worker = worker
        self._preempt = preempt
        self._holders: dict[str, Growth] = {}
        self._wanting: set[str] = set()
        self._wanted = asyncio.Event()
        self.is_short = False
        """Whether a holder waits for blocks because the pool had too few."""

    def add(self, holder_id: str, epoch: int, num_blocks: int) -> None:
        """Add a holder that has acquired `num_blocks` so far, including those that it gave back."""
        self._holders[holder_id] = Growth(holder_id, epoch, have=num_blocks, total=num_blocks)

    def want(self, holder_id: str, total: int) -> None:
        """Ask for blocks until the holder has acquired `total`, unless it has done so already."""
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
        self.is_short = self.is_short and bool(self._wanting)

    async def run(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            self.is_short = bool(self._wanting) and await self._is_refused()
            if self.is_short:
                await self._worker.store.wait_for_room(self._worker.pool_id, _RETRY_S)
                self._wanted.set()

    async def _is_refused(self) -> bool:
        """Ask for the blocks of all holders that want some; return whether the pool had too few."""
        worker = self._worker
        growths = [self._holders[holder_id] for holder_id in self._wanting]
        extension = await worker.store.extend(worker.pool_id, worker.worker_id, growths)
        is_refused = False
        for growth, grown in zip(growths, extension.grown, strict=True):
            holder = self._holders.get(growth.holder_id)
            # The holder may have been removed since the call, and added again at another epoch.
            if holder is not None and holder.epoch == growth.epoch:
                is_refused |= grown.error == OutOfBlocks.code
                self._add_granted(growth, grown)
        self._preempt(extension.demands)
        return is_refused

    def _add_granted(self, asked: Growth, grown: Grown) -> None:
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
        self._worker.engine.send(AddBlocks(asked.holder_id, grown.block_ids))
