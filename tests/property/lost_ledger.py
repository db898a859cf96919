"""The reports of workers and stamps about a ledger that the server has lost."""

from blockstore.memory.ledger import Ledger
from blockstore.records import Asserted, Content, Wait
from blockstore.store import QUARANTINE


def reported_by(ledger: Ledger, worker_id: str) -> tuple[str, list[Asserted], list[Wait]]:
    """The arguments of a worker's `reassert`: its holders and waits in the lost ledger."""
    holders = [
        Asserted(
            holder.holder_id,
            holder.epoch,
            holder.order,
            holder.num_cached_blocks,
            tuple(holder.acquired),
            tuple(sorted(set(holder.acquired) - holder.held)),
        )
        for holder in sorted(ledger.holders.values(), key=lambda holder: holder.sort_key)
        if holder.worker_id == worker_id and not holder.holder_id.startswith(QUARANTINE)
    ]
    waits = [
        Wait(holder_id, waiter.order, ledger.released.epoch(holder_id) or 0)
        for holder_id, waiter in ledger.waiters.items()
        if waiter.worker_id == worker_id
    ]
    return worker_id, holders, waits


def content_of(ledger: Ledger, block_id: int, private: set[int]) -> Content:
    """The content by a block's stamp; without a hash, whether the block is one of `private`."""
    prefix_hash = ledger.blocks.hash_of.get(block_id)
    if prefix_hash is None:
        return Content(private=block_id in private)
    return Content(prefix_hash, rank=ledger.spec.num_blocks - 1 - block_id)
