"""Copies and compares ledgers: the explorer visits every state of a ledger."""

import copy
from collections.abc import Hashable

from blockstore.memory.blocks import Blocks
from blockstore.memory.holders import Holder, Holders, Tombstones
from blockstore.memory.ledger import Ledger
from blockstore.memory.rebuilding import Rebuilding
from blockstore.memory.retentions import Retentions
from blockstore.memory.shares import Shares
from blockstore.memory.waiters import Waiters


def copy_ledger(ledger: Ledger) -> Ledger:
    """Return an independent ledger in the same state."""
    twin = copy.copy(ledger)
    twin.blocks = _copy_blocks(ledger.blocks)
    twin.workers = ledger.workers.copy()
    twin.leases = ledger.leases.copy()
    twin.holders = Holders((key, _copy_holder(holder)) for key, holder in ledger.holders.items())
    twin.waiters = Waiters(ledger.waiters)
    twin.retentions = _copy_retentions(ledger.retentions)
    twin.demands = ledger.demands.copy()
    twin.released = _copy_tombstones(ledger.released)
    twin.reaped = _copy_tombstones(ledger.reaped)
    twin.rebuilding = _copy_rebuilding(ledger.rebuilding)
    return twin


def snapshot(ledger: Ledger) -> Hashable:
    """Return a value that is equal for two ledgers if they give the same answers to all operations
    (while no tombstone expires)."""
    blocks, rebuilding = ledger.blocks, ledger.rebuilding
    return (
        (blocks.next_unused, tuple(blocks.returned), tuple(blocks.cached), tuple(blocks.kept)),
        (frozenset(ledger.retentions.items()), frozenset(blocks.retained.items())),
        (frozenset(blocks.refs.items()), frozenset(blocks.index.items())),
        (blocks.shares.records(), frozenset(blocks.payers.items())),
        frozenset(map(_holder_snapshot, ledger.holders.values())),
        frozenset(ledger.workers.items()),
        frozenset(ledger.leases.items()),
        frozenset(ledger.waiters.items()),
        frozenset(ledger.demands),
        frozenset(ledger.released.epochs.items()),
        frozenset(ledger.reaped.epochs),
        () if rebuilding.is_over else (frozenset(rebuilding.missing), rebuilding.top),
    )


def _copy_blocks(blocks: Blocks) -> Blocks:
    twin = copy.copy(blocks)
    for name in (
        "returned",
        "cached",
        "kept",
        "retained",
        "refs",
        "index",
        "hash_of",
        "ranks",
        "payers",
    ):
        setattr(twin, name, getattr(blocks, name).copy())
    twin.shares = Shares.of(blocks.shares.clock, blocks.shares.accounts)
    return twin


def _copy_holder(holder: Holder) -> Holder:
    own = (holder.holder_id, holder.worker_id, holder.order, holder.num_cached_blocks)
    return Holder(*own, holder.acquired.copy(), holder.held.copy(), holder.epoch, holder.runs)


def _copy_retentions(retentions: Retentions) -> Retentions:
    twin = Retentions(retentions.clock)
    twin.update(retentions)
    twin.charged = retentions.charged.copy()
    return twin


def _copy_tombstones(tombstones: Tombstones) -> Tombstones:
    return Tombstones(tombstones.clock, tombstones.epochs.copy(), tombstones._until.copy())


def _copy_rebuilding(rebuilding: Rebuilding) -> Rebuilding:
    """Return the object itself if the recovery is over: it cannot change then."""
    if rebuilding.is_over:
        return rebuilding
    twin = copy.copy(rebuilding)
    twin.missing = rebuilding.missing.copy()
    return twin


def _holder_snapshot(holder: Holder) -> Hashable:
    return (
        *(holder.holder_id, holder.worker_id, holder.order, holder.epoch),
        *(holder.num_cached_blocks, tuple(holder.acquired), frozenset(holder.held), holder.runs),
    )
