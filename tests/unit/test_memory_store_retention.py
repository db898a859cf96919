"""Retained prefixes in a pool of 11 blocks, with literal ids: what is evicted, and when."""

import pytest

from blockstore.errors import InvalidArgument
from blockstore.memory_store import MemoryStore
from blockstore.records import Retained, Retention
from blockstore.store import BlockStore
from tests.clock import Clock
from tests.unit.test_memory_store import POOL, A, B, C, X, allocate, counts

D = b"d" * 16
HOUR_MS = 3_600_000


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(clock: Clock) -> BlockStore:
    return await prepare(MemoryStore(clock))


async def prepare(store: BlockStore) -> BlockStore:
    """Cached: A B C in blocks 0 to 2, then X in block 3."""
    await store.register_pool(POOL)
    await store.register_worker(POOL, "w")
    await allocate(store, "a", 3)
    await store.commit("pool", "a", 1, [(0, A), (1, B), (2, C)])
    await allocate(store, "x", 1)
    await store.commit("pool", "x", 1, [(3, X)])
    await store.release("pool", "a", 1)
    await store.release("pool", "x", 1)
    return store


async def retain(
    store: BlockStore,
    name: str,
    *hashes: bytes,
    owner: str = "acme",
    ttl_ms: int = HOUR_MS,
    limits: tuple[int, int] = (11, 11),
) -> Retained:
    return await store.retain("pool", owner, name, ttl_ms, hashes, limits)


async def test_retained_blocks_are_evicted_last_tails_before_heads(store: BlockStore) -> None:
    assert await retain(store, "p", A, B, C) == Retained(3, 3, 3)
    assert await counts(store) == (7, 4, 0)

    assert await allocate(store, "b", 8) == (4, 5, 6, 7, 8, 9, 10, 3)
    assert await store.match("pool", (A, B, C)) == 3
    assert await allocate(store, "c", 2) == (2, 1)  # nothing else is left: no refusal
    assert await counts(store) == (0, 1, 10)


async def test_a_growing_request_gets_retained_blocks_too(store: BlockStore) -> None:
    await retain(store, "p", A, B, C)
    await retain(store, "q", X)
    assert await allocate(store, "b", 11) == (4, 5, 6, 7, 8, 9, 10, 2, 1, 0, 3)


async def test_a_retained_block_that_was_held_is_retained_again(store: BlockStore) -> None:
    """The last use counts among the retained: A and B are evicted after X."""
    await retain(store, "p", A, B)
    await retain(store, "q", X)
    found = await store.allocate("pool", "b", "w", 2, (A, B), 2)
    assert (found.block_ids, found.num_cached_blocks) == ((0, 1), 2)
    await store.release("pool", "b", 1)
    assert await counts(store) == (7, 4, 0)

    assert await allocate(store, "c", 10) == (4, 5, 6, 7, 8, 9, 10, 2, 3, 1)


async def test_a_prefix_may_be_retained_before_it_is_computed(store: BlockStore) -> None:
    assert await retain(store, "p", D) == Retained(1, 1, 1)
    assert await store.retentions("pool") == (Retention("acme", "p", 1, 0, 0),)
    await allocate(store, "d", 1)
    await store.commit("pool", "d", 1, [(4, D)])
    await store.release("pool", "d", 1)

    assert await allocate(store, "b", 10) == (5, 6, 7, 8, 9, 10, 2, 1, 0, 3)
    assert await store.match("pool", (D,)) == 1


async def test_an_evicted_prefix_is_retained_again_when_it_is_computed_again(
    store: BlockStore,
) -> None:
    await retain(store, "p", X)
    await allocate(store, "b", 11)
    await store.commit("pool", "b", 1, [(0, X)])
    await store.release("pool", "b", 1)
    assert await counts(store) == (10, 1, 0)
    assert await store.retentions("pool") == (Retention("acme", "p", 1, 1, 0),)


async def test_a_dropped_retention_is_evicted_as_any_prefix(store: BlockStore) -> None:
    """Its end counts as a use: X is evicted before A, B and C."""
    await retain(store, "p", A, B, C)
    assert await store.end_retention("pool", "acme", "p")
    assert not await store.end_retention("pool", "acme", "p")
    assert not await store.end_retention("pool", "other", "p")
    assert await store.retentions("pool") == ()
    assert await allocate(store, "b", 9) == (4, 5, 6, 7, 8, 9, 10, 3, 2)


async def test_a_prefix_stays_retained_while_any_retention_has_it(store: BlockStore) -> None:
    """Blocks in common are charged once."""
    assert await retain(store, "p", A, B) == Retained(2, 2, 2)
    assert await retain(store, "q", A, B, C) == Retained(3, 3, 3)
    assert await retain(store, "p", A, owner="other") == Retained(1, 0, 3)
    await store.end_retention("pool", "acme", "q")
    assert (await store.stats("pool")).num_retained == 2
    await store.end_retention("pool", "acme", "p")
    assert await counts(store) == (7, 4, 0)
    assert await retain(store, "r", C) == Retained(1, 2, 2)  # A is still charged to acme


async def test_a_retention_is_clipped_to_the_head_that_has_room(store: BlockStore) -> None:
    assert await retain(store, "p", A, B, C, limits=(2, 11)) == Retained(2, 2, 2)
    assert await retain(store, "q", A, B, C, limits=(2, 11)) == Retained(2, 2, 2)
    assert await retain(store, "q", X, limits=(2, 11)) == Retained(0, 2, 2)
    assert await retain(store, "q", X, owner="other", limits=(2, 2)) == Retained(0, 0, 2)
    assert await retain(store, "q", X, owner="other", limits=(2, 3)) == Retained(1, 1, 3)
    names = [(each.owner, each.name) for each in await store.retentions("pool")]
    assert names == [("acme", "p"), ("other", "q")]


async def test_a_name_has_one_prefix(store: BlockStore) -> None:
    await retain(store, "p", A, B, C)
    assert await retain(store, "p", X) == Retained(1, 1, 1)
    assert await store.retentions("pool") == (Retention("acme", "p", 1, 1, 0),)
    assert await allocate(store, "b", 9) == (4, 5, 6, 7, 8, 9, 10, 2, 1)


async def test_a_retracted_block_is_free_though_its_hash_is_retained(store: BlockStore) -> None:
    await retain(store, "p", A, B)
    await store.retract("pool", 1, B)
    assert await counts(store) == (8, 3, 0)


async def test_a_retention_of_no_time_ends_at_the_next_eviction(store: BlockStore) -> None:
    await retain(store, "p", A, B, ttl_ms=0)
    assert await allocate(store, "b", 9) == (4, 5, 6, 7, 8, 9, 10, 2, 3)
    assert await store.retentions("pool") == ()


async def test_a_chain_names_a_hash_once(store: BlockStore) -> None:
    with pytest.raises(InvalidArgument):
        await retain(store, "p", A, A)


async def test_a_retention_ends_when_its_time_has_passed(store: BlockStore, clock: Clock) -> None:
    await retain(store, "p", A, B, C, ttl_ms=5000)
    clock.advance(4)
    await retain(store, "p", A, B, C, ttl_ms=5000)  # again: it ends 5 s from now
    clock.advance(4)
    (retention,) = await store.retentions("pool")
    assert retention.left_ms == 1000
    assert await allocate(store, "b", 7) == (4, 5, 6, 7, 8, 9, 10)
    clock.advance(1)
    assert await allocate(store, "c", 2) == (3, 2)
    assert await store.retentions("pool") == ()
    assert (await store.stats("pool")).num_retained == 0
