"""Data types of the block store's arguments and answers (`blockstore.store`)."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import chain

PrefixHash = bytes
"""16 bytes; see `blockstore.hashing`."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The identity and geometry of a pool; all workers that join it have the same ones.

    `allocate` leaves `watermark_blocks` available when it admits a request, unless no block of the
    pool is held.
    """

    pool_id: str
    model: str
    fingerprint: str
    num_blocks: int
    block_size: int
    block_bytes: int
    watermark_blocks: int = 0


@dataclass(frozen=True, slots=True)
class Allocation:
    """The answer to `allocate`. `block_ids[:num_cached_blocks]` were found in the prefix index and
    are shared, the rest are new. `runs`: the number of hashes of each branch that were found."""

    holder_id: str
    epoch: int
    block_ids: tuple[int, ...]
    num_cached_blocks: int
    runs: tuple[int, ...] = ()

    def cached(
        self, hashes: Sequence[PrefixHash], branches: Sequence[Sequence[PrefixHash]] = ()
    ) -> dict[PrefixHash, int]:
        """Return the block of each hash that was found; the arguments are those of `allocate`."""
        runs = (branch[:run] for branch, run in zip(branches, self.runs, strict=False))
        found = dict.fromkeys(chain(hashes[: self.num_cached_blocks], *runs))
        return dict(zip(found, self.block_ids, strict=False))


@dataclass(frozen=True, slots=True)
class Growth:
    """A request to give a holder new blocks until it has acquired `total` in all; the answer starts
    at acquisition number `have`."""

    holder_id: str
    epoch: int
    have: int
    total: int


@dataclass(frozen=True, slots=True)
class Grown:
    """The answer to one `Growth`. `error` is None, "OUT_OF_BLOCKS" or "STALE_HOLDER"; with an
    error, `block_ids` is empty."""

    holder_id: str
    block_ids: tuple[int, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Extension:
    """The answer to `extend`. `demands`: holders that the asking worker must preempt, so that
    others can grow."""

    grown: tuple[Grown, ...]
    demands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to `claim`. `num_acquired`: the number of blocks that the holder ever got;
    `block_ids`: the blocks that it holds now, in order of acquisition."""

    epoch: int
    num_acquired: int
    block_ids: tuple[int, ...]

    @classmethod
    def of(cls, epoch: int, acquired: Sequence[int], held: Set[int]) -> "Claim":
        """Make a claim. A block that the holder gave back and acquired again is listed at its last
        acquisition."""
        latest = dict.fromkeys(reversed(acquired))
        block_ids = tuple(block_id for block_id in reversed(latest) if block_id in held)
        return cls(epoch, len(acquired), block_ids)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    fenced: bool
    demands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HolderInfo:
    """A holder in answers of the store. `num_blocks`: the number of blocks that it holds now."""

    holder_id: str
    epoch: int
    worker_id: str
    order: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """A block as an observer of the pool sees it. `num_holders` is 0 for a free or a cached block.
    `cached_at`: of a cached block, the pool's count of blocks that became cached; the block with
    the lowest one is evicted next. A block with neither is free."""

    block_id: int
    num_holders: int
    prefix_hash: PrefixHash | None
    cached_at: int | None


@dataclass(frozen=True, slots=True)
class Asserted:
    """A holder as its worker reports it in a recovery. `block_ids`: every block that it ever got,
    in order of acquisition; `given_back`: those that it no longer holds."""

    holder_id: str
    epoch: int
    order: int
    num_cached_blocks: int
    block_ids: tuple[int, ...]
    given_back: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait as its worker reports it in a recovery. `released_epoch`: for a returning waiter, the
    last epoch of its released holder; otherwise 0."""

    holder_id: str
    order: int
    released_epoch: int = 0


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a block, by its stamp: finished KV of `prefix_hash`, or data that a holder may
    have written (`private`), or neither if the block was never used. Finished blocks are evicted in
    order of `rank`, lowest first; ranks are distinct, and less than the pool's number of blocks."""

    prefix_hash: PrefixHash | None = None
    private: bool = False
    rank: int = 0


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counters of a pool, read in O(1). num_free + num_cached + num_held == spec.num_blocks, except
    while the pool is recovering: then num_free counts only free blocks that are accounted for.

    `num_prefix_queries` and `num_prefix_hits` count the hashes of allocations that were served.
    `ledger_epoch`: 1 + the number of times that the server lost the ledger.
    """

    spec: PoolSpec
    num_free: int
    num_cached: int
    num_held: int
    num_holders: int
    num_waiters: int
    num_prefix_queries: int
    num_prefix_hits: int
    worker_ids: tuple[str, ...]
    fenced_worker_ids: tuple[str, ...]
    ledger_epoch: int = 1
    recovering: bool = False
    missing_worker_ids: tuple[str, ...] = ()
    num_accounted: int = 0
    """The number of blocks from 0 up that are accounted for or, without a recovery, were ever
    used."""
    num_to_account: int = 0
    """The number of blocks from 0 up that have to be accounted for before the pool is reopened."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit; each violation is a sentence with its numbers. `ledger_checked` is
    False if the pool changed during every attempt of a paged recount, so that only its counters
    were checked, or if the pool is `recovering`, so that not every block has a state yet."""

    pool_id: str
    num_blocks: int
    num_free: int
    num_cached: int
    num_held: int
    num_holders: int
    num_references: int
    ledger_checked: bool
    violations: tuple[str, ...]
    recovering: bool = False

    @classmethod
    def of(
        cls, stats: PoolStats, num_references: int, is_checked: bool, violations: tuple[str, ...]
    ) -> "AuditReport":
        """Make a report from a pool's counters and the results of the audit."""
        return cls(
            pool_id=stats.spec.pool_id,
            num_blocks=stats.spec.num_blocks,
            num_free=stats.num_free,
            num_cached=stats.num_cached,
            num_held=stats.num_held,
            num_holders=stats.num_holders,
            num_references=num_references,
            ledger_checked=is_checked,
            violations=violations,
            recovering=stats.recovering,
        )
