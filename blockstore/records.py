"""Data types of the block store's arguments and answers (`blockstore.store`)."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from itertools import chain

PrefixHash = bytes
"""16 bytes; see `blockstore.hashing`."""


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """The identity and geometry of a pool, which are the same for all workers that join it."""

    pool_id: str
    model: str
    fingerprint: str
    num_blocks: int
    block_size: int
    block_bytes: int
    watermark_blocks: int = 0
    """How many blocks `allocate` leaves available, unless no block of the pool is held."""


@dataclass(frozen=True, slots=True)
class Allocation:
    """The answer to `allocate`: its first `num_cached_blocks` blocks were found in the prefix index
    and are shared, the others are new."""

    holder_id: str
    epoch: int
    block_ids: tuple[int, ...]
    num_cached_blocks: int
    runs: tuple[int, ...] = ()
    """The number of hashes that were found, for each branch."""

    def cached(
        self, hashes: Sequence[PrefixHash], branches: Sequence[Sequence[PrefixHash]] = ()
    ) -> dict[PrefixHash, int]:
        """Return the block of each hash that was found. The arguments are as for `allocate`."""
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
    """The answer to one `Growth`; after an error it has no blocks."""

    holder_id: str
    block_ids: tuple[int, ...]
    error: str | None = None
    """"OUT_OF_BLOCKS", "STALE_HOLDER", or None."""


@dataclass(frozen=True, slots=True)
class Extension:
    """The answer to `extend`."""

    grown: tuple[Grown, ...]
    demands: tuple[str, ...]
    """The holders that the asking worker must preempt, so that others can grow."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The answer to `claim`."""

    epoch: int
    num_acquired: int
    """The number of blocks that the holder ever got."""
    block_ids: tuple[int, ...]
    """The blocks that the holder holds now, in order of acquisition."""

    @classmethod
    def of(cls, epoch: int, acquired: Sequence[int], held: Set[int]) -> "Claim":
        """Make a claim. A block that the holder gave back and acquired again is listed at its last
        acquisition."""
        latest = dict.fromkeys(reversed(acquired))
        block_ids = tuple(block_id for block_id in reversed(latest) if block_id in held)
        return cls(epoch, len(acquired), block_ids)


@dataclass(frozen=True, slots=True)
class Retained:
    """The answer to `retain`."""

    num_blocks: int
    """The number of leading hashes that are retained."""
    num_of_owner: int
    """All hashes for which the owner is charged."""
    num_of_pool: int
    """All hashes that are retained."""


@dataclass(frozen=True, slots=True)
class Retention:
    """A prefix that an owner retains."""

    owner: str
    name: str
    num_blocks: int
    num_cached: int
    """The number of its hashes that are indexed."""
    left_ms: int = field(compare=False)
    """The time until it ends; 0 if its time has passed."""
    hashes: tuple[PrefixHash, ...] = ()
    """Its hashes, if they were asked for."""


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The answer to `heartbeat`."""

    fenced: bool
    demands: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class HolderInfo:
    """A holder in answers of the store, with the number of blocks that it holds now."""

    holder_id: str
    epoch: int
    worker_id: str
    order: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """A block as an observer of the pool sees it. A block without holders is cached if it has
    `cached_at`, and otherwise free."""

    block_id: int
    num_holders: int
    prefix_hash: PrefixHash | None
    cached_at: int | None
    """The number of blocks of the pool that had become cached when this one did; the block with the
    lowest number is evicted next."""


@dataclass(frozen=True, slots=True)
class Asserted:
    """A holder as its worker reports it in a recovery."""

    holder_id: str
    epoch: int
    order: int
    num_cached_blocks: int
    block_ids: tuple[int, ...]
    """Every block that the holder ever got, in order of acquisition."""
    given_back: tuple[int, ...] = ()
    """The blocks that the holder no longer holds."""


@dataclass(frozen=True, slots=True)
class Wait:
    """A wait as its worker reports it in a recovery."""

    holder_id: str
    order: int
    released_epoch: int = 0
    """The last epoch of the released holder of a returning waiter; 0 for any other waiter."""


@dataclass(frozen=True, slots=True)
class Content:
    """The content of a block, by its stamp: finished KV of `prefix_hash`, or data that a holder may
    have written (`private`), or neither if the block was never used."""

    prefix_hash: PrefixHash | None = None
    private: bool = False
    rank: int = 0
    """The place of a finished block in the order of eviction, from 0 on; no two ranks are equal."""


@dataclass(frozen=True, slots=True)
class Share:
    """A tenant's use of a pool (`blockstore.memory.shares`)."""

    tenant: str
    num_blocks: int
    """The blocks that it uses now."""
    block_ms: int = field(compare=False)
    """Blocks times milliseconds since the ledger was made."""


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Counters of a pool, read in O(1). num_free + num_cached + num_held == spec.num_blocks, except
    while the pool is recovering: then num_free counts only free blocks that are accounted for."""

    spec: PoolSpec
    num_free: int
    num_cached: int
    num_held: int
    num_holders: int
    num_waiters: int
    num_prefix_queries: int
    """The number of hashes in allocations that were served; `num_prefix_hits` were found."""
    num_prefix_hits: int
    worker_ids: tuple[str, ...]
    fenced_worker_ids: tuple[str, ...]
    ledger_epoch: int = 1
    """1 + the number of times that the server lost the ledger."""
    recovering: bool = False
    missing_worker_ids: tuple[str, ...] = ()
    num_accounted: int = 0
    """The number of blocks from 0 up that are accounted for or, without a recovery, were ever
    used."""
    num_to_account: int = 0
    """The number of blocks from 0 up that have to be accounted for before the pool is reopened."""
    num_retained: int = 0
    """The number of prefix hashes that are retained, whether a block has them or not."""
    made_ms: int = field(default=0, compare=False)
    """The server's clock when the ledger was made; 0 if it is not known."""
    shares: tuple[Share, ...] = ()
    """The shares of all tenants that used blocks, by name; nothing in a pool with functions of the
    version before."""


@dataclass(frozen=True, slots=True)
class AuditReport:
    """The result of an audit; each violation is a sentence with its numbers."""

    pool_id: str
    num_blocks: int
    num_free: int
    num_cached: int
    num_held: int
    num_holders: int
    num_references: int
    ledger_checked: bool
    """False if only the counters were checked, because the pool changed during every attempt of a
    paged recount, or because not every block of a recovering pool has a state yet."""
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
