"""The block store's interface: it records which blocks each holder has, and which prefix's KV each
block has.

Every operation is atomic and safe to send again with the same arguments: the second call changes
nothing and returns the same answer. There are two implementations: `RedisStore` (functions in the
server) and `MemoryStore` (plain Python: the model of the property tests and the fake of the unit
tests).

A block is in exactly one state, and a pool's counters always add up to its blocks (law 1):

    free      never used, or given back without a hash        (no holder, not in the prefix index)
    cached    no holder, in the prefix index; evictable, least recently used first, and retained
              ones after all others
    held      at least one holder; in the prefix index once its KV is complete

The contract defines which blocks (0 to num_blocks - 1) a request gets: first the block that was
given back last, then the lowest block never used, then the least recently used cached block.
Releasing frees a holder's blocks from its last to its first, so that tails are evicted before
heads.

A holder's epoch is odd while a worker runs it and even while its ticket is detached: `allocate`
returns 1, `detach` and `claim` add one. A call with another epoch raises StaleHolder.

"In order" always means by (order, holder id). An operation that frees the blocks of several holders
begins with the last holder in order. Operations check in this order: the pool exists, the arguments
are valid (InvalidArgument), the named worker is registered and not fenced, the holder exists, its
worker is not fenced, the epoch is right, the blocks are held. On a pool that does not exist, an
invalid argument may be reported first. Names have 1 to 1024 bytes, numbers are 0 to 2**53 - 1, and
a pool's id has no braces. The store remembers the last epoch of a released holder (its tombstone)
and the name of a reaped worker for `TOMBSTONE_S`.

After a server lost its data, the workers and the stamps give it a pool's ledger back. Until
`reopen`, every other mutation of the pool raises Recovering:

    recover_pool    makes the pool again at a higher ledger epoch; its workers are *missing*
    reassert        a missing worker reports what it holds and waits for
    reap, fence     a missing worker that died holds nothing; a stuck one gets a *quarantine*, a
                    holder of all blocks that it may still write
    restore         when no worker is missing: sets each block's content, from block 0 up, by its
                    stamp
    reopen          when all blocks are accounted for: ends the recovery

    [0 ........ next_unused)[next_unused ........ num_blocks)
     accounted for           held by a worker that reported it, or not yet accounted for
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from blockstore.records import (
    Allocation,
    Asserted,
    AuditReport,
    BlockInfo,
    Claim,
    Content,
    Extension,
    Growth,
    Heartbeat,
    HolderInfo,
    PoolSpec,
    PoolStats,
    PrefixHash,
    Retained,
    Retention,
    Wait,
)

QUARANTINE = "quarantine:"
"""Prefix of a quarantine's holder id, before the worker's id: the quarantine holds the blocks that
a fenced worker may still write after a recovery."""

MAX_BRANCHES = 100
"""The most branches of one allocation."""

TOMBSTONE_S = 600
"""How long the store remembers the ids of released holders and reaped workers, to refuse late
calls."""

NO_TENANT = "~"
"""The name under which requests without a tenant are charged. No tenant has this name."""


def tenant_of(holder_id: str) -> str:
    """Return the tenant that is charged for a holder's blocks: the part of its id before the first
    slash, or `NO_TENANT`. So a claim, a move, a swap and a recovery keep it. Holders of different
    tenants have different prefix hashes."""
    tenant, slash, _ = holder_id.partition("/")
    return tenant if tenant and slash else NO_TENANT


FUNCTION_LIBRARY, PREVIOUS_LIBRARY = "quire_v9", "quire_v8"
"""Names of the function library in the server, with its version, and of the version before. The
header of a pool names its own: during an upgrade, the pools of older workers stay with the
functions that those workers call."""


MarkOwned = Callable[[str, Sequence[int]], None]
"""Marks new blocks in their stamps as owned by a holder; arguments are the holder's id and the
block ids. The store's client calls it when it reads the answer, before its caller gets the answer
and before it sends anything else: the blocks are marked before the client can report the holder in
a recovery."""


class Recovery(Protocol):
    """Rebuilds a pool's ledger on a server that has none, or an old one. One process of the host at
    a time does each step; doing a step again is no error."""

    def begin(self, store: "BlockStore", run_id: str) -> Awaitable[None]:
        """Make the pool again unless the server with this `run_id` has its current ledger. Raises
        PoolGone if the pool's content is lost, too."""

    def finish(self, store: "BlockStore") -> Awaitable[None]:
        """Restore the blocks' contents and reopen the pool, unless workers are missing."""


class BlockStore(Protocol):
    """The operations on pools and their blocks. `blockstore.errors` has their errors. An
    operation on a pool that does not exist raises UnknownPool (except `drop_pool`). An operation
    that names a worker which is not on the pool raises UnknownWorker (except `leave` and `reap`).
    A mutation by or for a fenced worker raises WorkerFenced (except `release`, `give_back`,
    `withdraw`, `fence`, `leave` and `reap`). `claim` checks the fence of the claiming worker only:
    a detached holder has no writer."""

    async def register_pool(self, spec: PoolSpec) -> None:
        """Make a pool. Raises PoolExists if there is one with this id and another spec."""

    async def drop_pool(self, pool_id: str, /) -> None:
        """Forget a pool and all its keys. A pool that does not exist is no error."""

    async def pool_ids(self) -> tuple[str, ...]:
        """Return the ids of all pools, sorted."""

    async def register_worker(
        self,
        spec: PoolSpec,
        worker_id: str,
        recovery: Recovery | None = None,
        mark_owned: MarkOwned | None = None,
        lease_ms: int = 0,
    ) -> None:
        """Join a pool. A missing worker that joins holds nothing.

        A member on another host has no lock file here. Nobody reaps it within `lease_ms`, by the
        server's clock, and joining again renews this lease; with 0 it has none.

        With `recovery`, calls wait while the server has lost the pool, until the pool is rebuilt;
        without, they raise StoreLost from then on. `mark_owned` is called with the new (not cached)
        blocks that `allocate` and `extend` give to the worker's holders.

        Raises GeometryMismatch if block size, number or bytes differ, then FingerprintMismatch if
        weights, dtype or numerics do, and UnknownWorker if this name was reaped."""

    async def fence(self, pool_id: str, /, worker_id: str) -> None:
        """Fence a worker: from now on it may only release, and its waits end. A missing worker gets
        a quarantine and is no longer missing."""

    async def leave(self, pool_id: str, /, worker_id: str) -> None:
        """Remove a worker, missing or not, from the pool. A worker that is not on the pool is no
        error. Raises WorkerNotEmpty if it still holds or waits."""

    async def heartbeat(self, pool_id: str, /, worker_id: str) -> Heartbeat:
        """Return whether the worker is fenced, and the demands on its holders, in order, running
        and detached alike. Raises Recovering if the worker is missing and should reassert."""

    async def allocate(
        self,
        pool_id: str,
        /,
        holder_id: str,
        worker_id: str,
        order: int,
        hashes: Sequence[PrefixHash],
        num_blocks: int,
        branches: Sequence[Sequence[PrefixHash]] = (),
    ) -> Allocation:
        """Make a holder: share the longest indexed run of `hashes` and add new blocks, up to
        `num_blocks` in all. The holder gets all of them or none.

        `hashes` are the distinct hashes of the prompt's full blocks. `branches` are the hashes with
        which each of several sequences continues behind `hashes`, at most `MAX_BRANCHES`; if all of
        `hashes` is indexed, the longest indexed run of each branch is shared, too. A hash in
        several branches is one block; hashes and branches name at most num_blocks different hashes.
        Shared cached blocks leave the cache; new blocks may evict cached ones.

        needed = num_blocks - hits. available = free + cached - (hits that are cached), less
        `watermark_blocks` if any block of the pool is held; at least 0.

        Raises MustWait if a waiter with a lower `order` exists, otherwise OutOfBlocks if needed >
        available. After either error the holder is a waiter with this order and worker (a later
        call replaces both) until it is served or withdrawn, or its worker is fenced or reaped.
        Raises StaleHolder if the holder was released, or is at another epoch or worker. A worker
        that asks again gets the first `num_blocks` blocks that the holder acquired.
        """

    async def withdraw(self, pool_id: str, /, holder_id: str) -> None:
        """End a holder's wait. A holder that does not wait is no error."""

    async def extend(self, pool_id: str, /, worker_id: str, growths: Sequence[Growth]) -> Extension:
        """Grow running holders, lowest `order` first (equal orders as given); each holder gets all
        of its blocks or none.

        The answers are in the order of `growths`. Each has the blocks of acquisitions `have` to
        `total` - 1, including those that were given back since. A holder for which there are too
        few blocks, or which this worker does not run at this epoch, has an error in its answer, and
        the next one is tried.

        If there are too few blocks, the store demands the last holder in order on the whole pool
        whose worker is not fenced, which may belong to the asking worker; it demands nothing while
        another demand on a worker that is not fenced is outstanding. The demanded holder's worker
        reads the demand in this answer or in its next `extend` or `heartbeat`, until it releases
        the holder. Growth is served before waiters and may use the watermark's blocks.
        """

    async def commit(
        self, pool_id: str, /, holder_id: str, epoch: int, blocks: Sequence[tuple[int, PrefixHash]]
    ) -> tuple[bool, ...]:
        """Publish finished blocks in the prefix index, all or none. Returns for each block whether
        it is now indexed under its hash; if the index has another block, this one stays private. A
        call names a block once. Raises StaleHolder, or NotHeld if the holder does not hold one of
        the blocks, or a block has another hash."""

    async def retract(self, pool_id: str, /, block_id: int, prefix_hash: PrefixHash) -> None:
        """Remove a wrong entry from the index: a cached block becomes free, a held one becomes free
        on its last release. An entry that does not exist is no error."""

    async def detach(self, pool_id: str, /, holder_id: str, epoch: int) -> int:
        """Make a running holder claimable: epoch + 1, same worker. No step may be in flight. Raises
        StaleHolder, also if `epoch` is even. A repeated call gets the same answer until the holder
        is claimed."""

    async def claim(
        self,
        pool_id: str,
        /,
        holder_id: str,
        epoch: int,
        worker_id: str,
        block_ids: Sequence[int] = (),
    ) -> Claim:
        """Take over a detached holder: epoch + 1, now run by `worker_id`. `block_ids` are the
        blocks that its ticket names. Raises StaleHolder if the holder was released, is running, or
        was claimed by another worker, and NotHeld if it does not hold one of `block_ids`."""

    async def give_back(
        self, pool_id: str, /, holder_id: str, epoch: int, block_ids: Sequence[int]
    ) -> None:
        """Drop a holder's references to `block_ids`, from the last acquired to the first, in
        whatever order they are given. Blocks that it does not hold are no error."""

    async def release(
        self, pool_id: str, /, holder_id: str, epoch: int, comes_back: bool = False
    ) -> None:
        """Drop all of a holder's references and forget it; its id is never used again. A repeated
        call at the same epoch is no error while the tombstone lasts. Raises StaleHolder if the
        holder was never allocated, or is at another epoch.

        A preempted request that `comes_back` leaves a returning waiter with its order and worker
        (unless the worker is fenced): no later request is admitted until another holder of the same
        order asks for blocks, or the wait is withdrawn."""

    async def retain(
        self,
        pool_id: str,
        /,
        owner: str,
        name: str,
        ttl_ms: int,
        hashes: Sequence[PrefixHash],
        limits: tuple[int, int],
    ) -> Retained:
        """Retain a prefix for `ttl_ms` by the server's clock: its cached blocks are evicted after
        all blocks that are not retained. An allocation that needs them gets them nevertheless. The
        retention replaces the one that the owner has under this name.

        `hashes` are a chain and need not be indexed: a block that is committed later is retained
        too. Only the leading hashes are retained for which there is room: `limits` are the most
        hashes that this owner, and that all owners together, may retain. The owner that is first to
        retain a hash is charged for it. Retaining a hash, and
        the end of its last retention, count as a use of its block."""

    async def end_retention(self, pool_id: str, /, owner: str, name: str) -> bool:
        """End a retention; returns whether there was one."""

    async def retentions(self, pool_id: str, /, with_hashes: bool = False) -> tuple[Retention, ...]:
        """Return the retentions, sorted by owner and name; those whose time has passed may be among
        them. With `with_hashes`, one that was made meanwhile may lack its hashes."""

    async def match(self, pool_id: str, /, hashes: Sequence[PrefixHash]) -> int:
        """Return how many leading `hashes` are in the index. Changes nothing, not even the order of
        eviction."""

    async def holders(self, pool_id: str, /) -> tuple[HolderInfo, ...]:
        """Return all holders, in order. Raises Recovering while not all are known."""

    async def holder_page(self, pool_id: str, /, first: int, limit: int) -> tuple[HolderInfo, ...]:
        """Return up to `limit` holders from number `first` on, in an order that is stable while
        no holder comes or goes. Raises Recovering."""

    async def held_blocks(self, pool_id: str, /, holder_id: str) -> frozenset[int]:
        """Return the blocks that a holder holds now; none if there is no such holder (or pool)."""

    async def block_infos(self, pool_id: str, /, block_ids: Sequence[int]) -> tuple[BlockInfo, ...]:
        """Return what the ledger has about each of these blocks, for observers: the answer is not
        atomic, so a block that changes meanwhile may be shown wrongly."""

    async def stats(self, pool_id: str, /) -> PoolStats: ...

    async def reap(self, pool_id: str, /, worker_id: str) -> int:
        """Release everything that a dead worker held or waited for, the last holder in order first,
        remove the worker from the pool, and return the number of its holders. A worker that is not
        on the pool is no error (0). In both cases the name can no longer join. Raises LeaseHeld if
        the worker is on another host and its lease has not ended."""

    async def recover_pool(
        self, spec: PoolSpec, ledger_epoch: int, worker_ids: Sequence[str]
    ) -> None:
        """Make a pool whose ledger the server lost; `worker_ids` are the workers that may hold
        blocks, and are missing now. Raises PoolExists if the server has the pool at another ledger
        epoch (drop it if that one is old)."""

    async def reassert(
        self, spec: PoolSpec, worker_id: str, holders: Sequence[Asserted], waits: Sequence[Wait]
    ) -> tuple[str, ...]:
        """Report everything that a worker holds and waits for; returns the workers that are still
        missing. If two workers report the same holder, the higher epoch counts. Raises WorkerFenced
        or UnknownWorker if the worker was fenced or reaped before. A call to a pool that is not
        recovering changes nothing."""

    async def restore(self, pool_id: str, /, first: int, contents: Sequence[Content]) -> None:
        """Account for the blocks from `first` on. Finished blocks are indexed and, without a
        holder, cached; other blocks without a holder are free; each quarantine also holds the
        private ones. Raises Recovering if workers are missing, or blocks before `first` are not
        accounted for. A call to a pool that is not recovering changes nothing."""

    async def reopen(self, pool_id: str, /) -> None:
        """End the recovery; blocks not accounted for count as never used. Raises Recovering if
        workers are missing, if a holder has a block that is not accounted for, or if there is a
        quarantine, which needs all blocks accounted for."""

    async def audit(self, pool_id: str, /) -> AuditReport:
        """Recount references from the ledger and compare them with counters, states and index."""

    async def wait_for_room(self, pool_id: str, /, timeout_s: float) -> None:
        """Return when blocks of the pool were freed, or after the timeout. It may also return when
        a wait ended, or when an announcement may have been missed."""

    async def close(self) -> None: ...
