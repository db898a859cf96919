"""The block store's interface: who holds which block of a pool, and which block holds which prefix.

Every operation is atomic and safe to send again with the same arguments: the second time it changes
nothing and answers the same. Two implementations: `RedisStore` (functions in the server) and
`MemoryStore` (plain Python: the model of the property tests and the fake of the unit tests).

A block is in exactly one state, and a pool's counters always add up (law 1):

    free      never used, or given back without a hash        (no holder, not in the prefix index)
    cached    no holder, in the prefix index; evictable, least recently used first
    held      at least one holder; in the prefix index once its KV is complete

Which blocks (0 to num_blocks - 1) a request gets is part of the contract: blocks given back last
come first, then the lowest block never used, then the least recently used cached one. Releasing
frees a holder's blocks from its last to its first, so that tails are evicted before heads.

A holder's epoch is odd while its worker runs it and even while it is at rest in a ticket:
`allocate` answers 1, `detach` and `claim` add one. Whoever names another epoch is stale.

"In order" means by (order, holder id), everywhere; where blocks of several holders are freed at
once, the last holder in order goes first. Operations check in this order: the pool is there, the
worker they name is there and not fenced, the holder is there, its worker is not fenced, the epoch
is right, the blocks are held. Before all of that, but where the pool is not there, they look at the
arguments themselves: InvalidArgument. Names have 1 to 1024 bytes, numbers are 0 to 2**53 - 1, and a
pool's id has no braces. A released holder leaves a tombstone (its last epoch) for
`TOMBSTONE_S`, a reaped worker its name.

A server that lost its data gets a pool's ledger back from those who know it. Until `reopen` every
other mutation of the pool raises Recovering:

    recover_pool    the pool is there again at a higher ledger epoch; workers are *missing*
    reassert        a missing worker says what it holds and waits for
    reap, fence     one that died holds nothing; one that is stuck may hold whatever nobody can
                    vouch for: its *quarantine*, a holder like any
    restore         nobody is missing: what each block holds, from block 0 up, by its stamp
    reopen          all blocks are accounted for

    [0 ........ next_unused)[next_unused ........ num_blocks)
     accounted for           held by those who said so, or not yet accounted for
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from blockstore.records import (
    Allocation,
    Asserted,
    AuditReport,
    Claim,
    Content,
    Extension,
    Growth,
    Heartbeat,
    HolderInfo,
    PoolSpec,
    PoolStats,
    PrefixHash,
    Wait,
)

QUARANTINE = "quarantine:"
"""Before a worker's id: the holder of what a worker that was given up may still write."""

MAX_BRANCHES = 100
"""Of one allocation."""

TOMBSTONE_S = 600
"""How long the ids of released holders and of reaped workers are remembered, to refuse what comes
late."""

FUNCTION_LIBRARY = "quire_v4"
"""Name of the functions in the server; it carries their version and is compared when services
meet."""


Own = Callable[[str, Sequence[int]], None]
"""Marks the new blocks of a holder, given by its id, as blocks that this holder writes. The store's
client calls it with the answer, before its caller gets the answer and before the client sends
anything else: whatever the client says of the holder later, its blocks are marked."""


class Recovery(Protocol):
    """How a pool's ledger comes back on a server that knows nothing of it, or something old. Both
    are done by one process of the host at a time, and again: no error."""

    def begin(self, store: "BlockStore", run_id: str) -> Awaitable[None]:
        """Make the pool again unless the server, of this `run_id`, knows it as it is now.
        PoolGone: its content is gone too."""

    def finish(self, store: "BlockStore") -> Awaitable[None]:
        """Restore what is in the blocks and reopen the pool, unless somebody is missing."""


class BlockStore(Protocol):
    """Life of a pool's blocks. Errors are those of `blockstore.errors`; every operation on a pool
    that does not exist raises UnknownPool (except `drop_pool`), every one that names a worker which
    is not on the pool UnknownWorker (except `leave` and `reap`), and every mutation by or for a
    fenced worker WorkerFenced, except `release`, `give_back`, `withdraw`, `fence`, `leave` and
    `reap`. `claim` looks at the fence of the one who takes, not of the one who gives: a holder at
    rest has no writer."""

    async def register_pool(self, spec: PoolSpec) -> None:
        """Make a pool. PoolExists when its id is taken by another spec; by the same: no error."""

    async def drop_pool(self, pool_id: str) -> None:
        """Forget a pool and all its keys. A pool that does not exist is no error."""

    async def pool_ids(self) -> tuple[str, ...]:
        """All pools, sorted."""

    async def register_worker(
        self,
        spec: PoolSpec,
        worker_id: str,
        recovery: Recovery | None = None,
        own: Own | None = None,
    ) -> None:
        """Join a pool. GeometryMismatch (block size, number or bytes), then FingerprintMismatch
        (weights, dtype, numerics). UnknownWorker: this name was reaped. Again: no error. Who was
        missing holds nothing. With `recovery`, calls wait when the server has lost the pool, until
        it has it again; without, they raise StoreLost for ever. `own` gets what `allocate` and
        `extend` give to the worker's holders beyond what was cached."""

    async def fence(self, pool_id: str, worker_id: str) -> None:
        """From now on this worker may only release; its waits end. One that was missing gets a
        quarantine, and is missing no more. Again: no error."""

    async def leave(self, pool_id: str, worker_id: str) -> None:
        """Take an empty worker off the pool, be it missing. WorkerNotEmpty; a worker that is not
        there is no error."""

    async def heartbeat(self, pool_id: str, worker_id: str) -> Heartbeat:
        """What the pool wants from this worker; demands in order, at rest or not. Recovering: it is
        missing, and should reassert."""

    async def allocate(
        self,
        pool_id: str,
        holder_id: str,
        worker_id: str,
        order: int,
        hashes: Sequence[PrefixHash],
        num_blocks: int,
        branches: Sequence[Sequence[PrefixHash]] = (),
    ) -> Allocation:
        """Share the longest run of `hashes` that is cached, add new blocks up to `num_blocks` in
        all: all or nothing.

        `hashes` are those of the prompt's full blocks, distinct. `branches`: what each of several
        sequences goes on with where they end, at most `MAX_BRANCHES`; if all of `hashes` is cached,
        the longest run of each is shared too. What several have in common is one block: they name
        at most num_blocks in all. Shared blocks
        that nobody held leave the cache; new ones may evict. Available = free + cached - (cached
        hits about to be pinned), less `watermark_blocks` unless nothing is held on the pool, at
        least 0; that is also what OutOfBlocks reports, `needed` being num_blocks - hits.

        MustWait, looked at first: a waiter with a lower `order` is there. OutOfBlocks: needed >
        available. After either the holder is itself a waiter with this order and worker (a later
        try replaces both), until it is served, withdraws, or its worker is fenced or dies.
        StaleHolder: this id was allocated and released before, or has moved on to another epoch or
        worker. Again by the same worker: the same answer, which is the holder's first `num_blocks`
        acquisitions.
        """

    async def withdraw(self, pool_id: str, holder_id: str) -> None:
        """End a wait. A holder that does not wait is no error."""

    async def extend(self, pool_id: str, worker_id: str, growths: Sequence[Growth]) -> Extension:
        """Grow running holders, first by `order` first (then as given); each all or nothing.

        Answers stand as the growths were given, each with acquisitions number have to total - 1,
        also those given back since. A holder that is short, or not the worker's at this epoch, has
        an error in its answer, and the next one is tried; the call itself fails only with
        WorkerFenced, UnknownWorker or UnknownPool.

        When one is short, and no demand is outstanding (for a holder whose worker is not fenced),
        the last holder in order on the whole pool whose worker is not fenced is demanded, be it the
        asker's own: its current worker reads that in this answer or in its next `extend` or
        `heartbeat`, until the holder is released. Growth goes before waiters, and takes no notice
        of the watermark.
        """

    async def commit(
        self, pool_id: str, holder_id: str, epoch: int, blocks: Sequence[tuple[int, PrefixHash]]
    ) -> tuple[bool, ...]:
        """Publish finished blocks in the prefix index. True where the block is now the one of its
        hash; where the hash was there already its first block stays, and this one remains private
        (False). A call names a block once. All or nothing: StaleHolder; NotHeld: a block that the
        holder does not hold, or that carries another hash."""

    async def retract(self, pool_id: str, block_id: int, prefix_hash: PrefixHash) -> None:
        """Take a wrong entry out of the index: a cached block gets free, a held one is freed on its
        last release. An entry that is not there (any more) is no error."""

    async def detach(self, pool_id: str, holder_id: str, epoch: int) -> int:
        """Put a running holder at rest: epoch + 1, same worker. No step may be in flight.
        StaleHolder: also when `epoch` is even. Again, while nobody has claimed it: the same
        answer."""

    async def claim(
        self,
        pool_id: str,
        holder_id: str,
        epoch: int,
        worker_id: str,
        block_ids: Sequence[int] = (),
    ) -> Claim:
        """Take over a holder at rest: epoch + 1, now `worker_id`'s. StaleHolder: released, running,
        or somebody was faster. NotHeld: one of `block_ids`, what its ticket says to have, is not
        held by it. Again by the winner: the same answer."""

    async def give_back(
        self, pool_id: str, holder_id: str, epoch: int, block_ids: Sequence[int]
    ) -> None:
        """Drop some of a holder's references, from the last acquired to the first, however they are
        named; blocks that it does not hold (any more) are no error. StaleHolder."""

    async def release(
        self, pool_id: str, holder_id: str, epoch: int, comes_back: bool = False
    ) -> None:
        """Drop all of a holder's references and forget it; its id is never used again. Again at the
        same epoch: no error, while its tombstone lasts. StaleHolder: never allocated, or moved on
        to another epoch.

        `comes_back`, of one that gave way to others: its request keeps its place in line. From now
        on the released holder is a waiter with its order, of its worker (unless that is fenced):
        nobody behind it is admitted until another holder of the same order asks, or the wait is
        withdrawn."""

    async def match(self, pool_id: str, hashes: Sequence[PrefixHash]) -> int:
        """How many leading `hashes` are in the index. Changes nothing, not even the order of
        eviction."""

    async def victim(self, pool_id: str) -> HolderInfo | None:
        """The last holder in order whose worker is not fenced: who gives way first. None: nothing
        is held. Recovering."""

    async def holders(self, pool_id: str) -> tuple[HolderInfo, ...]:
        """All holders, in order. Recovering: not all are known."""

    async def stats(self, pool_id: str) -> PoolStats: ...

    async def reap(self, pool_id: str, worker_id: str) -> int:
        """Release all that a dead worker held or waited for, the last holder in order first, and
        take it off the pool; how many holders that were. A worker that is not there is no error
        (0); either way the name can no longer join."""

    async def recover_pool(
        self, spec: PoolSpec, ledger_epoch: int, worker_ids: Sequence[str]
    ) -> None:
        """Make a pool again of which the server lost the ledger; `worker_ids`, who may hold
        something of it, are missing. PoolExists: it is there at another ledger epoch (an old one:
        drop it). Again: no error."""

    async def reassert(
        self,
        spec: PoolSpec,
        worker_id: str,
        holders: Sequence[Asserted],
        waits: Sequence[Wait],
    ) -> tuple[str, ...]:
        """What a worker holds and waits for, all of it; who is missing now. Of two who know the
        same holder, the one at the higher epoch is right. WorkerFenced: it was given up before.
        UnknownWorker: reaped before. Again, or of a pool that is not recovering: no change."""

    async def restore(self, pool_id: str, first: int, contents: Sequence[Content]) -> None:
        """Account for the blocks from `first` on. Finished ones are indexed and, if nobody holds
        them, cached; others that nobody holds are free; private ones are held by each quarantine
        too. Recovering: workers are missing, or blocks before `first` not accounted for. Again, or
        when it is not recovering: no change."""

    async def reopen(self, pool_id: str) -> None:
        """End the recovery; blocks not accounted for were never used. Recovering: workers are
        missing, or somebody holds such a block, or there is a quarantine, for which all blocks have
        to be accounted for. Again: no error."""

    async def audit(self, pool_id: str) -> AuditReport:
        """Recount references from the ledger and compare with counters, states and index."""

    async def wait_for_room(self, pool_id: str, timeout_s: float) -> None:
        """Return when blocks of the pool were freed, or after the timeout. It may return for less:
        a wait that ended, or news that may have been missed."""

    async def close(self) -> None: ...
