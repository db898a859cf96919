"""The blocks that a request gets, and those that it evicts: a pool of 11 blocks, with literal
ids."""

import asyncio

import pytest

from blockstore.errors import InvalidArgument, NotHeld, OutOfBlocks, PoolExists, UnknownPool
from blockstore.memory_store import MemoryStore
from blockstore.records import PoolSpec
from blockstore.store import MAX_BRANCHES, BlockStore

POOL = PoolSpec("pool", "model", "fingerprint", num_blocks=11, block_size=4, block_bytes=64)
A, B, C, X = (bytes([letter]) * 16 for letter in b"abcx")


@pytest.fixture
async def store() -> BlockStore:
    return await prepare(MemoryStore())


async def prepare(store: BlockStore) -> BlockStore:
    """A pool of 11 blocks with one worker, w."""
    await store.register_pool(POOL)
    await store.register_worker(POOL, "w")
    return store


async def allocate(
    store: BlockStore, holder_id: str, num_blocks: int, hashes: tuple[bytes, ...] = ()
) -> tuple[int, ...]:
    return (await store.allocate("pool", holder_id, "w", 1, hashes, num_blocks)).block_ids


async def counts(store: BlockStore) -> tuple[int, int, int]:
    """(free, cached, held), after an audit that found nothing."""
    report = await store.audit("pool")
    assert report.violations == ()
    return report.num_free, report.num_cached, report.num_held


async def test_never_used_blocks_come_lowest_first(store: BlockStore) -> None:
    assert await allocate(store, "a", 4) == (0, 1, 2, 3)
    assert await allocate(store, "b", 3) == (4, 5, 6)
    assert await counts(store) == (4, 0, 7)


async def test_given_back_last_comes_first(store: BlockStore) -> None:
    """Blocks are released from the last to the first, so the next request gets them in order."""
    await allocate(store, "a", 3)
    await allocate(store, "b", 2)
    await store.release("pool", "a", 1)
    await store.release("pool", "b", 1)

    assert await allocate(store, "c", 7) == (3, 4, 0, 1, 2, 5, 6)


async def test_share_free_allocate_again(store: BlockStore) -> None:
    """All operations on a prefix of three blocks."""
    assert await allocate(store, "a", 4, (A, B, C)) == (0, 1, 2, 3)
    published = await store.commit("pool", "a", 1, [(0, A), (1, B), (2, C)])
    assert published == (True, True, True)

    # b has the first two blocks in common with a
    shared = await store.allocate("pool", "b", "w", 2, (A, B, X), 4)
    assert (shared.block_ids, shared.num_cached_blocks) == ((0, 1, 4, 5), 2)
    assert await counts(store) == (5, 0, 6)

    await store.release("pool", "a", 1)  # 3 is free, 2 is cached; 0 and 1 are still b's
    assert await counts(store) == (6, 1, 4)
    await store.release("pool", "b", 1)  # 5 and 4 are free, then 1 and 0 are cached
    assert await counts(store) == (8, 3, 0)

    assert await store.match("pool", (A, B, C, X)) == 3
    again = await store.allocate("pool", "c", "w", 3, (A, B, C), 5)
    assert (again.block_ids, again.num_cached_blocks) == ((0, 1, 2, 4, 5), 3)


D, E, F = (bytes([letter]) * 16 for letter in b"def")


async def grown_tree(store: BlockStore) -> None:
    """Cached: A B C, and behind A also D E, in blocks 0 to 4."""
    await allocate(store, "a", 3, (A, B, C))
    await store.commit("pool", "a", 1, [(0, A), (1, B), (2, C)])
    await allocate(store, "b", 3, (A, D, E))
    await store.commit("pool", "b", 1, [(3, D), (4, E)])
    await store.release("pool", "a", 1)
    await store.release("pool", "b", 1)


async def test_branches_are_found_behind_what_they_have_in_common(store: BlockStore) -> None:
    """The longest run of each branch, and every block once; a repeated call has the same answer."""
    await grown_tree(store)
    branches = [(B, C, X), (D, X, E), (), (B, F), (F,)]
    for _ in range(2):
        found = await store.allocate("pool", "c", "w", 3, (A,), 9, branches)
        assert found.block_ids == (0, 1, 2, 3, 5, 6, 7, 8, 9)
        assert (found.num_cached_blocks, found.runs) == (4, (2, 1, 0, 1, 0))
    assert found.cached((A,), branches) == {A: 0, B: 1, C: 2, D: 3}
    assert await counts(store) == (1, 1, 9)
    stats = await store.stats("pool")
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (3 + 3 + 7, 0 + 1 + 4)


async def test_lookup_finds_nothing_behind_a_missing_block(store: BlockStore) -> None:
    """The gap would have to be computed, and blocks behind it would be held meanwhile without
    use."""
    await grown_tree(store)
    found = await store.allocate("pool", "c", "w", 3, (A, X), 5, [(B, C)])
    assert (found.block_ids, found.runs) == ((0, 5, 6, 7, 8), (0,))
    assert found.cached((A, X), [(B, C)]) == {A: 0}


async def test_hits_of_branches_are_not_evicted_for_what_is_new(store: BlockStore) -> None:
    """11 blocks, 5 of them cached: 10 fit with 4 hits, and 1 cached block is evicted."""
    await grown_tree(store)
    found = await store.allocate("pool", "c", "w", 3, (A,), 11, [(B, C), (D,)])
    assert found.block_ids == (0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 4)
    await store.release("pool", "c", 1)
    with pytest.raises(OutOfBlocks) as refused:
        await store.allocate("pool", "d", "w", 4, (A,), 12, [(B, C), (D,)])
    assert (refused.value.needed, refused.value.available) == (8, 7)


async def test_branches_that_cannot_be_are_refused(store: BlockStore) -> None:
    with pytest.raises(InvalidArgument):
        await store.allocate("pool", "a", "w", 1, (A,), 2, [(B,), (C,)])  # 3 hashes
    with pytest.raises(InvalidArgument):
        await store.allocate("pool", "a", "w", 1, (A,), 2, [(B,)] * (MAX_BRANCHES + 1))
    found = await store.allocate("pool", "a", "w", 1, (A,), 2, [(B,)] * MAX_BRANCHES)
    assert found.runs == (0,) * MAX_BRANCHES


async def test_the_least_recently_used_is_evicted_tails_before_heads(store: BlockStore) -> None:
    await allocate(store, "a", 3)
    await store.commit("pool", "a", 1, [(0, A), (1, B), (2, C)])
    await allocate(store, "b", 1)
    await store.commit("pool", "b", 1, [(3, X)])
    await store.release("pool", "b", 1)
    await store.release("pool", "a", 1)
    assert await counts(store) == (7, 4, 0)  # least recently used first: 3, 2, 1, 0

    assert await allocate(store, "c", 9) == (4, 5, 6, 7, 8, 9, 10, 3, 2)
    assert await store.match("pool", (X,)) == 0
    assert await store.match("pool", (A, B, C)) == 2
    assert await counts(store) == (0, 2, 9)


async def test_hits_are_pinned_before_others_are_evicted(store: BlockStore) -> None:
    """The oldest cached block is the hit itself: the next oldest is evicted instead."""
    await allocate(store, "a", 11)
    await store.commit("pool", "a", 1, [(10, A), (9, B)])
    await store.release("pool", "a", 1)  # least recently used first: 10, 9

    assert await allocate(store, "b", 11, (A,)) == (10, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert await store.match("pool", (B,)) == 0


async def test_pinned_hits_do_not_count_as_available(store: BlockStore) -> None:
    """10 new blocks are needed, 9 are free, and both cached ones are about to be shared."""
    await allocate(store, "a", 2)
    await store.commit("pool", "a", 1, [(0, A), (1, B)])
    await store.release("pool", "a", 1)

    with pytest.raises(OutOfBlocks) as refused:
        await store.allocate("pool", "b", "w", 1, (A, B), 12)
    assert (refused.value.needed, refused.value.available) == (10, 9)
    assert await counts(store) == (9, 2, 0)


async def test_a_hash_keeps_its_first_block(store: BlockStore) -> None:
    """Two requests computed the same prefix; the second one's block is free on release, not
    cached."""
    await allocate(store, "a", 1)
    await allocate(store, "b", 1)

    assert await store.commit("pool", "a", 1, [(0, A)]) == (True,)
    assert await store.commit("pool", "b", 1, [(1, A)]) == (False,)
    assert await store.commit("pool", "a", 1, [(0, A)]) == (True,)
    assert await store.commit("pool", "b", 1, [(1, A)]) == (False,)
    await store.release("pool", "b", 1)
    assert await counts(store) == (10, 0, 1)
    assert await allocate(store, "c", 2, (A,)) == (0, 1)


async def test_a_commit_is_all_or_nothing(store: BlockStore) -> None:
    await allocate(store, "a", 2)
    await allocate(store, "b", 1)
    await store.commit("pool", "a", 1, [(1, B)])

    with pytest.raises(NotHeld, match="block 2 is not held by a"):
        await store.commit("pool", "a", 1, [(0, A), (2, X)])
    with pytest.raises(NotHeld, match="block 1 carries another hash"):
        await store.commit("pool", "a", 1, [(0, A), (1, X)])
    assert await store.match("pool", (A,)) == 0


async def test_any_holder_commits_a_shared_block(store: BlockStore) -> None:
    await allocate(store, "a", 1)
    await store.commit("pool", "a", 1, [(0, A)])
    await allocate(store, "b", 2, (A,))

    assert await store.commit("pool", "b", 1, [(0, A), (1, B)]) == (True, True)


async def test_retract_frees_what_is_cached_and_hides_what_is_held(store: BlockStore) -> None:
    await allocate(store, "a", 2)
    await store.commit("pool", "a", 1, [(0, A), (1, B)])
    await store.retract("pool", 0, A)
    assert await store.match("pool", (A, B)) == 0
    await store.release("pool", "a", 1)
    assert await counts(store) == (10, 1, 0)

    await store.retract("pool", 0, B)  # not the block of this hash
    assert await counts(store) == (10, 1, 0)
    await store.retract("pool", 1, B)
    await store.retract("pool", 1, B)
    assert await counts(store) == (11, 0, 0)
    assert await allocate(store, "b", 3) == (1, 0, 2)


async def test_give_back_frees_from_the_last_acquired_to_the_first(store: BlockStore) -> None:
    await allocate(store, "a", 5)
    await store.give_back("pool", "a", 1, [1, 3, 2])
    await store.give_back("pool", "a", 1, [1, 3, 2, 9])
    assert (await store.holders("pool"))[0].num_blocks == 2
    assert await counts(store) == (9, 0, 2)

    assert await allocate(store, "b", 4) == (1, 2, 3, 5)


async def test_giving_back_a_shared_block_leaves_it_to_the_others(store: BlockStore) -> None:
    await allocate(store, "a", 1)
    await store.commit("pool", "a", 1, [(0, A)])
    await allocate(store, "b", 1, (A,))
    await store.give_back("pool", "a", 1, [0])

    assert await counts(store) == (10, 0, 1)
    await store.release("pool", "b", 1)
    assert await counts(store) == (10, 1, 0)


async def test_prefix_counters_count_what_was_served(store: BlockStore) -> None:
    """Neither a refused allocation nor a repeated call is counted."""
    await allocate(store, "a", 2, (A, B))
    await store.commit("pool", "a", 1, [(0, A)])
    await allocate(store, "b", 2, (A, B))
    await allocate(store, "b", 2, (A, B))
    with pytest.raises(OutOfBlocks):
        await allocate(store, "c", 99, (A,))

    stats = await store.stats("pool")
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (4, 1)


async def test_pools_are_apart(store: BlockStore) -> None:
    other = PoolSpec("other", "model", "fingerprint", num_blocks=2, block_size=4, block_bytes=64)
    await store.register_pool(other)
    await store.register_pool(other)
    await store.register_worker(other, "w")
    assert await store.pool_ids() == ("other", "pool")
    with pytest.raises(PoolExists):
        await store.register_pool(PoolSpec("other", "model", "fingerprint", 3, 4, 64))

    assert (await store.allocate("other", "a", "w", 1, [], 2)).block_ids == (0, 1)
    assert await counts(store) == (11, 0, 0)
    await store.drop_pool("other")
    await store.drop_pool("other")
    with pytest.raises(UnknownPool):
        await store.stats("other")


async def test_waiters_are_woken_by_a_release(store: BlockStore) -> None:
    await allocate(store, "a", 1)
    waiting = asyncio.create_task(store.wait_for_room("pool", timeout_s=60))
    await asyncio.sleep(0)  # until it waits
    assert not waiting.done()
    await store.release("pool", "a", 1)
    await asyncio.wait_for(waiting, timeout=5)

    await store.wait_for_room("pool", timeout_s=0.001)  # nothing gets free: returns all the same
