"""What the block store (`blockstore.store`) is told and what it answers."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import chain

PrefixHash = bytes
"""16 bytes; see `blockstore.hashing`."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """What a pool is; the same for everyone who joins it.

    `watermark_blocks` must stay free when `allocate` admits a request to a pool on which something
    is held.
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
    """`block_ids[:num_cached_blocks]` were found in the prefix index and are shared, the rest are
    new. `runs`: how many hashes of each branch were found."""

    holder_id: str
    epoch: int
    block_ids: tuple[int, ...]
    num_cached_blocks: int
    runs: tuple[int, ...] = ()

    def cached(
        self, hashes: Sequence[PrefixHash], branches: Sequence[Sequence[PrefixHash]] = ()
    ) -> dict[PrefixHash, int]:
        """What was found of what was asked for: a block for each hash."""
        runs = (branch[:run] for branch, run in zip(branches, self.runs, strict=False))
        found = dict.fromkeys(chain(hashes[: self.num_cached_blocks], *runs))
        return dict(zip(found, self.block_ids, strict=False))


@dataclass(frozen=True, slots=True)
class Growth:
    """Bring `holder_id` to `total` blocks ever acquired; the answer starts at acquisition number
    `have`."""

    holder_id: str
    epoch: int
    have: int
    total: int


@dataclass(frozen=True, slots=True)
class Grown:
    """Answer to one `Growth`. `error` is None, "OUT_OF_BLOCKS" or "STALE_HOLDER"; with an error,
    `block_ids` is empty."""

    holder_id: str
    block_ids: tuple[int, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Extension:
    """`demands`: holders of the asking worker that must give way (be detached and released) so that
    others can grow."""

    grown: tuple[Grown, ...]
    demands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Claim:
    """A holder as whoever takes it over gets it. `num_acquired`: blocks that it ever got;
    `block_ids`: those of them that it holds, as acquired."""

    epoch: int
    num_acquired: int
    block_ids: tuple[int, ...]

    @classmethod
    def of(cls, epoch: int, acquired: Sequence[int], held: Set[int]) -> "Claim":
        """A block that was given back and acquired again counts as acquired last."""
        latest = dict.fromkeys(reversed(acquired))
        block_ids = tuple(block_id for block_id in reversed(latest) if block_id in held)
        return cls(epoch, len(acquired), block_ids)


@dataclass(frozen=True, slots=True)
class Heartbeat:
    fenced: bool
    demands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HolderInfo:
    """`num_blocks`: those that it holds now, without what it gave back."""

    holder_id: str
    epoch: int
    worker_id: str
    order: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class Asserted:
    """A holder as its worker knows it. `block_ids`: every block that it ever got, as acquired;
    `given_back`: those of them that it does not hold any more."""

    holder_id: str
    epoch: int
    order: int
    num_cached_blocks: int
    block_ids: tuple[int, ...]
    given_back: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait as its worker knows it. `released_epoch`: of one that gave way and comes back, its
    holder's last; else 0."""

    holder_id: str
    order: int
    released_epoch: int = 0


@dataclass(frozen=True, slots=True)
class Content:
    """What a block's stamp says: finished KV of `prefix_hash`, or that somebody wrote there
    (`private`), or neither: it was never used. Finished ones are evicted lowest `rank` first;
    ranks are distinct, and below the pool's number of blocks."""

    prefix_hash: PrefixHash | None = None
    private: bool = False
    rank: int = 0


@dataclass(frozen=True, slots=True)
class PoolStats:
    """O(1) counters; num_free + num_cached + num_held == spec.num_blocks, but while the pool is
    recovering: then num_free counts free blocks that are accounted for.

    `num_prefix_queries` and `num_prefix_hits` count the hashes of allocations that were served.
    `ledger_epoch`: 1, and one more each time that the server lost the ledger.
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
    """Blocks from 0 up that are accounted for, or were used."""
    num_to_account: int = 0
    """Blocks from 0 up that have to be accounted for before the pool is reopened."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """`ledger_checked` is False when the pool kept changing under a paged recount, so that only
    counters were checked, and while it is `recovering`, when its blocks have no places yet."""

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
