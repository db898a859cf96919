"""Waiting, order and preemption: law 8 in a pool of 11 blocks."""

from dataclasses import replace

import pytest

from blockstore.errors import MustWait, OutOfBlocks
from blockstore.memory_store import MemoryStore
from blockstore.records import Grown, Growth, PoolSpec
from blockstore.store import BlockStore
from services.protocol.ticket import queue_order

POOL = PoolSpec("pool", "model", "fingerprint", num_blocks=11, block_size=4, block_bytes=64)
A = b"a" * 16


@pytest.fixture
def empty() -> BlockStore:
    return MemoryStore()


@pytest.fixture
async def store() -> BlockStore:
    return await prepare(MemoryStore())


@pytest.fixture
async def full() -> BlockStore:
    return await prepare_full(MemoryStore())


async def prepare(store: BlockStore, watermark_blocks: int = 0) -> BlockStore:
    """A pool of 11 blocks with workers v and w."""
    spec = replace(POOL, watermark_blocks=watermark_blocks)
    await store.register_pool(spec)
    await store.register_worker(spec, "v")
    await store.register_worker(spec, "w")
    return store


async def prepare_full(store: BlockStore) -> BlockStore:
    """All 11 blocks are held: `first` (order 1) by v, `middle` (2) by w, `last` (3) by v."""
    await prepare(store)
    await store.allocate("pool", "first", "v", 1, [], 4)
    await store.allocate("pool", "middle", "w", 2, [], 4)
    await store.allocate("pool", "last", "v", 3, [], 3)
    return store


async def num_waiters(store: BlockStore) -> int:
    return (await store.stats("pool")).num_waiters


async def test_a_later_request_does_not_overtake(store: BlockStore) -> None:
    """b would fit, but a came first; both wait until a is served."""
    await store.allocate("pool", "x", "v", 1, [], 8)
    with pytest.raises(OutOfBlocks):
        await store.allocate("pool", "a", "v", 2, [], 4)
    with pytest.raises(MustWait):
        await store.allocate("pool", "b", "w", 3, [], 1)
    assert await num_waiters(store) == 2

    await store.release("pool", "x", 1)
    with pytest.raises(MustWait):
        await store.allocate("pool", "b", "w", 3, [], 1)
    assert (await store.allocate("pool", "a", "v", 2, [], 4)).block_ids == (0, 1, 2, 3)
    assert (await store.allocate("pool", "b", "w", 3, [], 1)).block_ids == (4,)
    assert await num_waiters(store) == 0


async def test_an_earlier_request_passes_a_later_waiter(store: BlockStore) -> None:
    await store.allocate("pool", "x", "v", 1, [], 8)
    with pytest.raises(OutOfBlocks):
        await store.allocate("pool", "late", "v", 9, [], 4)

    assert (await store.allocate("pool", "urgent", "w", 2, [], 2)).block_ids == (8, 9)


async def test_requests_of_equal_order_do_not_wait_for_each_other(store: BlockStore) -> None:
    """Two attempts of one request have the same order: the new one does not wait for the old
    one."""
    await store.allocate("pool", "x", "v", 1, [], 8)
    with pytest.raises(OutOfBlocks):
        await store.allocate("pool", "a.1", "v", 2, [], 4)

    assert (await store.allocate("pool", "a.2", "w", 2, [], 3)).block_ids == (8, 9, 10)


async def test_a_wait_ends_by_withdrawal(store: BlockStore) -> None:
    await store.allocate("pool", "x", "v", 1, [], 8)
    with pytest.raises(OutOfBlocks):
        await store.allocate("pool", "a", "v", 2, [], 4)
    await store.withdraw("pool", "a")
    await store.withdraw("pool", "a")

    assert (await store.allocate("pool", "b", "w", 3, [], 1)).block_ids == (8,)


async def test_a_waiter_may_rise_while_it_waits(store: BlockStore) -> None:
    """A later call with another order replaces the first one."""
    await store.allocate("pool", "x", "v", 1, [], 11)
    for holder_id, order in (("a", 5), ("b", 6)):
        with pytest.raises((OutOfBlocks, MustWait)):
            await store.allocate("pool", holder_id, "v", order, [], 4)
    with pytest.raises(OutOfBlocks):
        await store.allocate("pool", "b", "v", 4, [], 4)  # no longer behind a

    await store.release("pool", "x", 1)
    with pytest.raises(MustWait):
        await store.allocate("pool", "a", "v", 5, [], 4)
    await store.allocate("pool", "b", "v", 4, [], 4)


async def test_urgent_waiters_without_end_delay_a_default_one_by_less_than_a_minute(
    store: BlockStore,
) -> None:
    """Each second a request of priority -128 asks for the whole pool, which the one before it then
    releases. Priority -128 is a head start of 59.534 s."""
    await store.allocate("pool", "0", "v", queue_order(-128, 0), [], 11)
    with pytest.raises(OutOfBlocks):
        await store.allocate("pool", "default", "w", queue_order(0, 1), [], 11)
    for second in range(1, 60):
        urgent = "pool", str(second), "v", queue_order(-128, 1000 * second), (), 11
        with pytest.raises(OutOfBlocks):
            await store.allocate(*urgent)
        await store.release("pool", str(second - 1), 1)
        await store.allocate(*urgent)
    with pytest.raises(MustWait):
        await store.allocate("pool", "60", "v", queue_order(-128, 60_000), [], 11)
    await store.release("pool", "59", 1)
    await store.allocate("pool", "default", "w", queue_order(0, 1), [], 11)


async def test_waiters_of_a_fenced_or_dead_worker_delay_no_request(store: BlockStore) -> None:
    await store.allocate("pool", "x", "v", 1, [], 8)
    for worker_id, end in (("v", store.fence), ("w", store.reap)):
        with pytest.raises(OutOfBlocks):
            await store.allocate("pool", f"of {worker_id}", worker_id, 2, [], 4)
        await end("pool", worker_id)
    assert await num_waiters(store) == 0


async def test_admission_keeps_the_watermark_unless_nothing_is_held(empty: BlockStore) -> None:
    store = await prepare(empty, watermark_blocks=3)
    await store.allocate("pool", "a", "v", 1, [], 10)  # leaves 1, but the pool was empty
    await store.release("pool", "a", 1)

    await store.allocate("pool", "b", "v", 2, [], 5)
    with pytest.raises(OutOfBlocks) as refused:
        await store.allocate("pool", "c", "v", 3, [], 4)
    assert (refused.value.needed, refused.value.available) == (4, 3)
    await store.allocate("pool", "c", "v", 3, [], 3)

    # 3 are free: growth takes no notice, and goes before the waiter
    with pytest.raises(OutOfBlocks) as refused:
        await store.allocate("pool", "d", "w", 4, [], 1)
    assert (refused.value.needed, refused.value.available) == (1, 0)
    answer = await store.extend("pool", "v", [Growth("b", 1, 5, 8)])
    assert answer.grown == (Grown("b", (8, 9, 10)),)


async def test_cached_blocks_count_for_the_watermark_until_pinned(empty: BlockStore) -> None:
    store = await prepare(empty, watermark_blocks=2)
    await store.allocate("pool", "a", "v", 1, [], 1)
    await store.commit("pool", "a", 1, [(0, A)])
    await store.release("pool", "a", 1)
    await store.allocate("pool", "b", "v", 2, [], 7)

    with pytest.raises(OutOfBlocks) as refused:
        await store.allocate("pool", "c", "v", 3, [A], 3)  # 3 free + 1 cached - 1 pinned - 2
    assert (refused.value.needed, refused.value.available) == (2, 1)
    assert (await store.allocate("pool", "c", "v", 3, [A], 2)).block_ids == (0, 8)


async def test_first_in_order_grows_first(store: BlockStore) -> None:
    """Two blocks are left for three: the answers are in the order of the calls, the blocks go by
    order of arrival."""
    for order, holder_id in enumerate(("a", "b", "c"), start=1):
        await store.allocate("pool", holder_id, "v", order, [], 3)
    growths = [Growth(holder_id, 1, 3, 4) for holder_id in ("c", "b", "a")]

    answer = await store.extend("pool", "v", growths)
    assert answer.grown == (Grown("c", (), "OUT_OF_BLOCKS"), Grown("b", (10,)), Grown("a", (9,)))
    assert answer.demands == ("c",)


async def test_growth_is_all_or_nothing_for_each(store: BlockStore) -> None:
    await store.allocate("pool", "a", "v", 1, [], 4)
    await store.allocate("pool", "b", "v", 2, [], 5)

    answer = await store.extend("pool", "v", [Growth("a", 1, 4, 7), Growth("b", 1, 5, 6)])
    assert answer.grown == (Grown("a", (), "OUT_OF_BLOCKS"), Grown("b", (9,)))


async def test_the_last_in_order_is_preempted_whichever_worker_runs_it(full: BlockStore) -> None:
    """w is short; v reads in its heartbeat that `last` must be preempted. There is one demand at a
    time."""
    answer = await full.extend("pool", "w", [Growth("middle", 1, 4, 5)])
    assert answer.grown == (Grown("middle", (), "OUT_OF_BLOCKS"),)
    assert answer.demands == ()
    assert (await full.heartbeat("pool", "v")).demands == ("last",)

    answer = await full.extend("pool", "v", [Growth("first", 1, 4, 5)])
    assert answer.demands == ("last",)  # still the only one
    await full.detach("pool", "last", 1)
    assert (await full.heartbeat("pool", "v")).demands == ("last",)
    await full.release("pool", "last", 2)
    assert (await full.heartbeat("pool", "v")).demands == ()
    answer = await full.extend("pool", "w", [Growth("middle", 1, 4, 5)])
    assert answer.grown == (Grown("middle", (8,)),)


async def test_the_last_holder_preempts_itself_if_it_lacks_blocks(full: BlockStore) -> None:
    assert (await full.extend("pool", "v", [Growth("last", 1, 3, 4)])).demands == ("last",)


async def test_holders_are_asked_to_yield_one_at_a_time(full: BlockStore) -> None:
    """A holder that is short again before `last` is preempted does not cause another demand."""
    short = [Growth("first", 1, 4, 5)]
    assert (await full.extend("pool", "v", short)).demands == ("last",)
    await full.give_back("pool", "middle", 1, [7])
    await full.allocate("pool", "later", "w", 4, [], 1)
    assert (await full.extend("pool", "v", short)).demands == ("last",)
    assert (await full.heartbeat("pool", "w")).demands == ()


async def test_a_demand_follows_its_holder(full: BlockStore) -> None:
    """A ticket at rest can be preempted too; the worker that claims it reads the demand."""
    await full.detach("pool", "last", 1)
    await full.extend("pool", "w", [Growth("middle", 1, 4, 5)])
    await full.claim("pool", "last", 2, "w")

    assert (await full.heartbeat("pool", "v")).demands == ()
    assert (await full.heartbeat("pool", "w")).demands == ("last",)


async def test_fenced_workers_are_neither_asked_nor_waited_for(full: BlockStore) -> None:
    """v got the demand and was stopped: w's own holder, the last of those that can act, is next."""
    await full.extend("pool", "w", [Growth("middle", 1, 4, 5)])
    await full.fence("pool", "v")

    answer = await full.extend("pool", "w", [Growth("middle", 1, 4, 5)])
    assert answer.demands == ("middle",)
    assert (await full.heartbeat("pool", "v")).demands == ("last",)


async def test_equal_orders_are_ordered_by_holder_id(store: BlockStore) -> None:
    for holder_id in ("b", "c", "a"):
        await store.allocate("pool", holder_id, "v", 1, [], 1)

    assert [holder.holder_id for holder in await store.holders("pool")] == ["a", "b", "c"]
    answer = await store.extend("pool", "v", [Growth("a", 1, 1, POOL.num_blocks)])
    assert answer.demands == ("c",)


async def test_a_preempted_holder_keeps_its_queue_position_until_it_is_back(
    full: BlockStore,
) -> None:
    """Its blocks go to the others' growth, and to no request that came later."""
    await full.release("pool", "last", 1, comes_back=True)
    assert await num_waiters(full) == 1
    with pytest.raises(MustWait):
        await full.allocate("pool", "later", "w", 4, [], 1)
    await full.extend("pool", "v", [Growth("first", 1, 4, 5)])
    back = await full.allocate("pool", "last-again", "w", 3, [], 2)
    assert back.block_ids == (9, 10)
    assert await num_waiters(full) == 1
    with pytest.raises(OutOfBlocks):
        await full.allocate("pool", "later", "w", 4, [], 1)


async def test_a_returning_holder_without_room_waits_once(full: BlockStore) -> None:
    await full.release("pool", "last", 1, comes_back=True)
    with pytest.raises(OutOfBlocks):
        await full.allocate("pool", "last-again", "w", 3, [], 4)
    assert await num_waiters(full) == 1


async def test_the_wait_of_a_released_request_can_be_withdrawn(full: BlockStore) -> None:
    """By its worker; or with the worker, by a fence or when it is reaped."""
    await full.release("pool", "last", 1, comes_back=True)
    await full.release("pool", "last", 1, comes_back=True)
    assert await num_waiters(full) == 1
    await full.withdraw("pool", "last")
    assert (await full.allocate("pool", "later", "w", 4, [], 3)).num_cached_blocks == 0
    await full.release("pool", "later", 1, comes_back=True)
    await full.fence("pool", "w")
    assert await num_waiters(full) == 0
    await full.release("pool", "middle", 1, comes_back=True)
    assert await num_waiters(full) == 0


async def test_a_wait_of_another_holder_with_equal_order_stays(full: BlockStore) -> None:
    """Only the preempted holder is replaced by its successor."""
    with pytest.raises(OutOfBlocks):
        await full.allocate("pool", "a", "v", 4, [], 1)
    with pytest.raises(OutOfBlocks):
        await full.allocate("pool", "b", "w", 4, [], 1)
    assert await num_waiters(full) == 2
