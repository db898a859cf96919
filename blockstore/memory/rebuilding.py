"""The recovery of a ledger that the server lost.

The workers report their holders; the stamps tell the content of the blocks. A stuck worker makes no
report, and may still write private blocks: its quarantine holds them.

See ADR 58.
"""

from collections.abc import Iterable, Sequence

from blockstore.errors import Recovering
from blockstore.memory.blocks import Blocks
from blockstore.memory.holders import Holder
from blockstore.records import Asserted, Content
from blockstore.store import QUARANTINE


class Rebuilding:
    """Tracks the progress of a recovery: the workers that are `missing`, because they have not made
    their report yet, and the block `top`, below which all blocks have to be accounted for."""

    def __init__(self, missing: Iterable[str] = (), is_over: bool = True) -> None:
        self.missing = set(missing)
        self.top = 0
        self.is_over = is_over

    def require_over(self) -> None:
        """Raise Recovering if a recovery is in progress."""
        if not self.is_over:
            raise Recovering("the pool is recovering: nothing changes until it is whole")

    def require_reported(self, worker_id: str) -> None:
        """Raise Recovering if the worker is missing."""
        if worker_id in self.missing:
            raise Recovering(f"{worker_id} has not said what it holds")

    def require_all_reported(self) -> None:
        """Raise Recovering if any worker is missing."""
        if self.missing:
            raise Recovering(f"missing are {', '.join(sorted(self.missing))}")

    def accept_report(
        self, known: Holder | None, asserted: Asserted, worker_id: str
    ) -> Holder | None:
        """Return the holder that `asserted` describes, or None if `known`, an earlier report of the
        same holder, has the same epoch or a higher one."""
        if known is not None and known.epoch >= asserted.epoch:
            return None
        holder = Holder(asserted.holder_id, worker_id, asserted.order, asserted.num_cached_blocks)
        holder.epoch = asserted.epoch
        holder.acquire(asserted.block_ids)
        holder.held.difference_update(asserted.given_back)
        self.top = max([self.top, *(block_id + 1 for block_id in holder.held)])
        return holder

    def restore(
        self, blocks: Blocks, quarantines: Sequence[Holder], first: int, contents: Sequence[Content]
    ) -> None:
        """Account for the blocks from `first` on, unless that is done. Raises Recovering if blocks
        before `first` are not accounted for."""
        if first > blocks.next_unused:
            raise Recovering(f"blocks from {blocks.next_unused} on are not accounted for")
        for content in contents[blocks.next_unused - first :]:
            if content.private and quarantines:
                if blocks.next_unused not in blocks.refs:
                    blocks.payers.pop(blocks.next_unused, None)
                for quarantine in quarantines:
                    blocks.share([blocks.next_unused], quarantine.holder_id)
                    quarantine.acquire([blocks.next_unused])
            blocks.restore(content)

    def end(self, blocks: Blocks) -> None:
        """End the recovery. Raises Recovering if a block that may be held is not accounted for."""
        if blocks.next_unused < self.top:
            raise Recovering(f"blocks {blocks.next_unused} to {self.top - 1} may be held")
        self.is_over = True
        self.top = 0
        blocks.ranks = {}


def quarantine_of(worker_id: str) -> Holder:
    """Return the quarantine of a fenced worker: detached, and first in order. `restore` gives it
    its blocks."""
    quarantine = Holder(QUARANTINE + worker_id, worker_id, order=0, num_cached_blocks=0)
    quarantine.epoch = 2
    return quarantine
