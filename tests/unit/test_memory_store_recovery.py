"""A lost ledger is rebuilt from the workers' reports and from the stamps."""

from collections.abc import Awaitable, Sequence

import pytest

from blockstore.errors import (
    MustWait,
    OutOfBlocks,
    PoolExists,
    Recovering,
    StaleHolder,
    UnknownWorker,
    WorkerFenced,
)
from blockstore.memory_store import MemoryStore
from blockstore.records import Asserted, Content, Growth, HolderInfo, PoolSpec, Wait
from blockstore.store import BlockStore

POOL = PoolSpec("pool", "model", "fingerprint", num_blocks=11, block_size=4, block_bytes=64)
A, B, C, D = b"a" * 16, b"b" * 16, b"c" * 16, b"d" * 16
PRIVATE, UNUSED = Content(private=True), Content()
STAMPS = (Content(A, rank=2), Content(B, rank=1), PRIVATE, PRIVATE, Content(C, rank=0), PRIVATE)
"""Blocks 0 and 1 belong to one prompt, block 4 to another; the others have been written to."""

RUNNING = Asserted("a", 1, 1, 0, (0, 1, 2))
AT_REST = Asserted("r", 2, 2, 2, (0, 1, 3))


@pytest.fixture
async def store() -> BlockStore:
    return await prepare(MemoryStore())


async def prepare(store: BlockStore) -> BlockStore:
    """v and w have not reported."""
    await store.recover_pool(POOL, 2, ["v", "w"])
    return store


async def finish(store: BlockStore, contents: Sequence[Content] = STAMPS) -> None:
    num_unused = max(0, (await store.stats("pool")).num_to_account - len(contents))
    await store.restore("pool", 0, [*contents, *[UNUSED] * num_unused])
    await store.reopen("pool")
    report = await store.audit("pool")
    assert report.ledger_checked
    assert report.violations == ()


async def counts(store: BlockStore) -> tuple[int, int, int]:
    """Free, cached, held."""
    stats = await store.stats("pool")
    return stats.num_free, stats.num_cached, stats.num_held


async def test_workers_and_stamps_together_make_the_ledger_whole(store: BlockStore) -> None:
    """Reported holders keep their blocks, finished blocks without a holder are cached, and the rest
    is free; the next request takes blocks in the usual order."""
    assert await store.reassert(POOL, "v", [RUNNING], []) == ("w",)
    assert await store.reassert(POOL, "w", [AT_REST], []) == ()
    await finish(store)

    assert await counts(store) == (6, 1, 4)
    assert await store.holders("pool") == (
        HolderInfo("a", 1, "v", 1, 3),
        HolderInfo("r", 2, "w", 2, 3),
    )
    assert await store.match("pool", [A, B]) == 2
    extension = await store.extend("pool", "v", [Growth("a", 1, 3, 4)])
    assert extension.grown[0].block_ids == (5,)
    assert (await store.claim("pool", "r", 2, "v")).epoch == 3
    allocation = await store.allocate("pool", "n", "w", 9, [A, B], 3)
    assert (allocation.block_ids, allocation.num_cached_blocks) == ((0, 1, 6), 2)
    await store.release("pool", "a", 1)
    await store.release("pool", "r", 3)
    await store.release("pool", "n", 1)
    assert await counts(store) == (8, 3, 0)


async def test_tails_are_evicted_before_heads(store: BlockStore) -> None:
    """By rank, in any order of the blocks."""
    for worker in ("v", "w"):
        await store.reassert(POOL, worker, [], [])
    await finish(store)
    assert (await store.allocate("pool", "x", "v", 1, [], 9)).block_ids == (
        *(5, 3, 2, 6, 7, 8, 9, 10),
        4,
    )
    assert (await store.allocate("pool", "y", "v", 1, [], 1)).block_ids == (1,)
    assert await store.match("pool", [A]) == 1


async def test_one_of_two_finished_blocks_with_equal_content_is_cached(store: BlockStore) -> None:
    for worker in ("v", "w"):
        await store.reassert(POOL, worker, [], [])
    await finish(store, (Content(A, rank=1), Content(A, rank=0)))
    assert await counts(store) == (10, 1, 0)


async def refused(call: Awaitable[object]) -> None:
    with pytest.raises(Recovering):
        await call


async def test_the_pool_does_not_change_until_it_is_whole(store: BlockStore) -> None:
    await refused(store.heartbeat("pool", "v"))
    await store.reassert(POOL, "v", [RUNNING], [])
    assert (await store.heartbeat("pool", "v")).fenced is False
    await refused(store.restore("pool", 0, STAMPS))
    await refused(store.reopen("pool"))
    await store.reassert(POOL, "w", [], [])
    for call in (
        store.allocate("pool", "n", "v", 3, [], 1),
        store.withdraw("pool", "n"),
        store.extend("pool", "v", [Growth("a", 1, 3, 4)]),
        store.commit("pool", "a", 1, [(2, D)]),
        store.retract("pool", 0, A),
        store.detach("pool", "a", 1),
        store.claim("pool", "a", 2, "w"),
        store.give_back("pool", "a", 1, [2]),
        store.release("pool", "a", 1),
        store.holders("pool"),
    ):
        await refused(call)
    await refused(store.reopen("pool"))  # block 2 is held, but not accounted for
    await refused(store.restore("pool", 3, STAMPS))
    stats = await store.stats("pool")
    assert (stats.recovering, stats.missing_worker_ids) == (True, ())
    assert (stats.num_accounted, stats.num_to_account) == (0, 3)
    report = await store.audit("pool")
    assert (report.recovering, report.ledger_checked) == (True, False)
    assert report.violations == ()
    await finish(store)
    assert not (await store.stats("pool")).recovering
    await store.release("pool", "a", 1)


async def test_every_step_may_be_sent_again(store: BlockStore) -> None:
    for _ in range(2):
        await store.recover_pool(POOL, 2, ["v", "w"])
        await store.reassert(POOL, "v", [RUNNING], [Wait("n", 5)])
    for _ in range(2):
        await store.reassert(POOL, "w", [AT_REST], [])
    for first in (0, 0, 2, 4):
        await store.restore("pool", first, STAMPS[first : first + 4])
    for _ in range(2):
        await store.reopen("pool")
    assert await store.reassert(POOL, "v", [RUNNING], []) == ()
    await store.restore("pool", 0, STAMPS)
    await store.recover_pool(POOL, 2, ["v", "w"])
    assert await counts(store) == (6, 1, 4)
    assert (await store.stats("pool")).num_waiters == 1


async def test_a_pool_at_another_ledger_epoch_is_in_the_way(store: BlockStore) -> None:
    for epoch in (1, 3):
        with pytest.raises(PoolExists):
            await store.recover_pool(POOL, epoch, [])
    await store.drop_pool("pool")
    await store.recover_pool(POOL, 3, [])
    assert (await store.stats("pool")).ledger_epoch == 3


@pytest.mark.parametrize("issuer_first", [True, False])
async def test_the_report_of_the_claimer_counts(store: BlockStore, issuer_first: bool) -> None:
    """The issuer may not know of the claim yet."""
    claimed = Asserted("r", 3, 2, 2, (0, 1, 3, 5))
    reports = [("v", AT_REST), ("w", claimed)]
    for worker, holder in reports if issuer_first else reversed(reports):
        await store.reassert(POOL, worker, [holder], [])
    await finish(store)
    assert await store.holders("pool") == (HolderInfo("r", 3, "w", 2, 4),)
    with pytest.raises(StaleHolder):
        await store.release("pool", "r", 2)
    await store.release("pool", "r", 3)
    assert await counts(store) == (8, 3, 0)


async def test_acquisitions_keep_their_numbers(store: BlockStore) -> None:
    """Also those of blocks that were returned since."""
    await store.reassert(POOL, "v", [Asserted("a", 1, 1, 0, (0, 1, 2), given_back=(1,))], [])
    await store.leave("pool", "w")
    await finish(store)
    assert (await store.stats("pool")).num_held == 2
    extension = await store.extend("pool", "v", [Growth("a", 1, 1, 4)])
    assert extension.grown[0].block_ids == (1, 2, 5)


async def test_waits_are_kept_in_order(store: BlockStore) -> None:
    await store.reassert(POOL, "v", [], [Wait("first", 1)])
    await store.reassert(POOL, "w", [], [Wait("second", 2)])
    await finish(store)
    with pytest.raises(MustWait):
        await store.allocate("pool", "second", "w", 2, [], 1)
    await store.allocate("pool", "first", "v", 1, [], 1)
    await store.allocate("pool", "second", "w", 2, [], 1)


async def test_blocks_of_a_dead_worker_are_free(store: BlockStore) -> None:
    """Whether it died before its report or after it."""
    await store.reassert(POOL, "v", [RUNNING], [])
    assert await store.reap("pool", "v") == 1
    assert await store.reap("pool", "w") == 0
    with pytest.raises(UnknownWorker):
        await store.reassert(POOL, "w", [AT_REST], [])
    await finish(store)
    assert await counts(store) == (8, 3, 0)


async def test_blocks_that_a_stuck_worker_may_write_are_not_reused(store: BlockStore) -> None:
    """Blocks that have been written to, by any worker. Finished blocks and those never used can be
    allocated. When the worker dies, all can."""
    await store.reassert(POOL, "v", [RUNNING], [])
    await store.fence("pool", "w")
    assert (await store.stats("pool")).missing_worker_ids == ()
    await refused(store.reopen("pool"))  # nobody has reported what is in the blocks
    with pytest.raises(WorkerFenced):
        await store.reassert(POOL, "w", [AT_REST], [])
    await finish(store)

    assert await counts(store) == (5, 1, 5)
    assert (await store.holders("pool"))[0] == HolderInfo("quarantine:w", 2, "w", 0, 3)
    await store.release("pool", "a", 1)
    assert await counts(store) == (5, 3, 3)
    with pytest.raises(OutOfBlocks):
        await store.allocate("pool", "n", "v", 1, [], 9)
    assert (await store.allocate("pool", "n", "v", 1, [], 8)).block_ids == (
        *(10, 9, 8, 7, 6),
        *(4, 1, 0),
    )
    await store.reap("pool", "w")
    assert await counts(store) == (3, 0, 8)


async def test_two_stuck_workers_quarantine_the_same_blocks(store: BlockStore) -> None:
    for worker in ("v", "w"):
        await store.fence("pool", worker)
    await finish(store)
    assert await counts(store) == (5, 3, 3)
    await store.reap("pool", "v")
    assert await counts(store) == (5, 3, 3)
    await store.reap("pool", "w")
    assert await counts(store) == (8, 3, 0)


async def test_a_worker_that_joins_during_recovery_holds_nothing(store: BlockStore) -> None:
    """Also a worker that was joining when the ledger was lost."""
    await store.register_worker(POOL, "v")
    await store.register_worker(POOL, "x")
    await store.reassert(POOL, "w", [], [])
    await finish(store)
    assert (await store.stats("pool")).worker_ids == ("v", "w", "x")
