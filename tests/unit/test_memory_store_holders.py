"""Epochs: which worker may continue a holder, stale calls, and repeated calls."""

import pytest

from blockstore.errors import BlockStoreError, InvalidArgument, NotHeld, OutOfBlocks, StaleHolder
from blockstore.memory_store import MemoryStore
from blockstore.records import Allocation, Claim, Grown, Growth, PoolSpec
from blockstore.store import TOMBSTONE_S, BlockStore
from tests.clock import Clock

POOL = PoolSpec("pool", "model", "fingerprint", num_blocks=11, block_size=4, block_bytes=64)
A = b"a" * 16


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(clock: Clock) -> BlockStore:
    return await prepare(MemoryStore(clock))


async def prepare(store: BlockStore) -> BlockStore:
    """A pool of 11 blocks with workers p (prefill) and d (decode); p holds `a` with 3 blocks."""
    await store.register_pool(POOL)
    await store.register_worker(POOL, "p")
    await store.register_worker(POOL, "d")
    await store.allocate("pool", "a", "p", 1, [], 3)
    return store


async def assert_stale(store: BlockStore, epoch: int) -> None:
    """Every call for `a` with this epoch is refused, and changes nothing."""
    before = await store.holders("pool"), await store.stats("pool")
    for attempt in (
        store.commit("pool", "a", epoch, [(0, A)]),
        store.detach("pool", "a", epoch),
        store.claim("pool", "a", epoch, "p"),
        store.give_back("pool", "a", epoch, [0]),
        store.release("pool", "a", epoch),
    ):
        with pytest.raises(StaleHolder):
            await attempt
    for worker_id in ("p", "d"):
        (answer,) = (await store.extend("pool", worker_id, [Growth("a", epoch, 3, 4)])).grown
        assert answer == Grown("a", (), "STALE_HOLDER")
    assert (await store.holders("pool"), await store.stats("pool")) == before


async def test_hand_off(store: BlockStore) -> None:
    """p detaches (2), d claims (3): from then on p is stale, and d continues with p's blocks."""
    assert await store.detach("pool", "a", 1) == 2
    assert (await store.claim("pool", "a", 2, "d")).epoch == 3

    await assert_stale(store, 1)
    with pytest.raises(StaleHolder):
        await store.claim("pool", "a", 2, "p")
    grown = await store.extend("pool", "d", [Growth("a", 3, 3, 4)])
    assert grown.grown == (Grown("a", (3,)),)
    (info,) = await store.holders("pool")
    assert (info.worker_id, info.epoch, info.num_blocks) == ("d", 3, 4)


async def test_a_running_holder_cannot_be_claimed(store: BlockStore) -> None:
    """Blocks are never taken from a live owner (law 4)."""
    with pytest.raises(StaleHolder, match="running on p"):
        await store.claim("pool", "a", 1, "d")

    # nor has it been, when that comes again after it was put at rest
    await store.detach("pool", "a", 1)
    for worker_id in ("p", "d"):
        with pytest.raises(StaleHolder):
            await store.claim("pool", "a", 1, worker_id)


async def test_a_holder_at_rest_cannot_be_detached(store: BlockStore) -> None:
    await store.detach("pool", "a", 1)
    with pytest.raises(StaleHolder, match="detached at epoch"):
        await store.detach("pool", "a", 2)

    # nor has it been, when that comes again after it was claimed
    await store.claim("pool", "a", 2, "d")
    with pytest.raises(StaleHolder):
        await store.detach("pool", "a", 2)


async def test_epochs_to_come_are_stale_too(store: BlockStore) -> None:
    await assert_stale(store, 2)
    await assert_stale(store, 3)


async def test_every_call_may_be_sent_again(store: BlockStore) -> None:
    """Each reply was lost once: the second answer equals the first, and nothing happened twice."""
    again = [await store.allocate("pool", "b", "p", 2, [], 2) for _ in range(2)]
    assert again == [Allocation("b", 1, (3, 4), 0)] * 2

    growth = [Growth("b", 1, 2, 4)]
    assert [(await store.extend("pool", "p", growth)).grown for _ in range(2)] == [
        (Grown("b", (5, 6)),)
    ] * 2
    assert [await store.commit("pool", "b", 1, [(3, A)]) for _ in range(2)] == [(True,)] * 2
    assert [await store.detach("pool", "b", 1) for _ in range(2)] == [2, 2]
    assert [(await store.claim("pool", "b", 2, "d")).epoch for _ in range(2)] == [3, 3]
    for _ in range(2):
        await store.give_back("pool", "b", 3, [6])
    for _ in range(2):
        await store.release("pool", "b", 3)

    stats = await store.stats("pool")
    assert (stats.num_free, stats.num_cached, stats.num_held) == (7, 1, 3)
    assert (await store.audit("pool")).violations == ()


async def test_a_claim_is_answered_again_to_the_winner_only(store: BlockStore) -> None:
    await store.detach("pool", "a", 1)
    await store.claim("pool", "a", 2, "d")
    await store.detach("pool", "a", 3)
    with pytest.raises(StaleHolder):
        await store.claim("pool", "a", 2, "d")  # d won at epoch 2, but has let go since


async def test_the_issuer_may_take_its_own_ticket_back(store: BlockStore) -> None:
    await store.detach("pool", "a", 1)
    assert (await store.claim("pool", "a", 2, "p")).epoch == 3


async def test_growth_answers_acquisitions_that_were_given_back(store: BlockStore) -> None:
    """Acquisition numbers never shrink: a returned block keeps its number, and the next one is new
    even if it is the same block."""
    await store.give_back("pool", "a", 1, [1])
    answer = await store.extend("pool", "p", [Growth("a", 1, 0, 5)])
    assert answer.grown == (Grown("a", (0, 1, 2, 1, 3)),)
    assert (await store.holders("pool"))[0].num_blocks == 4

    await store.release("pool", "a", 1)
    # freed in the order 3, 1 (as last acquired), 2, 0
    assert (await store.allocate("pool", "b", "p", 1, [], 4)).block_ids == (0, 2, 1, 3)


async def test_a_growth_that_was_reached_before_answers_what_was_asked_for(
    store: BlockStore,
) -> None:
    answer = await store.extend("pool", "p", [Growth("a", 1, 1, 2)])
    assert answer.grown == (Grown("a", (1,)),)


async def test_a_released_id_is_refused_for_ten_minutes(store: BlockStore, clock: Clock) -> None:
    await store.release("pool", "a", 1)
    clock.now_s += TOMBSTONE_S - 1
    with pytest.raises(StaleHolder):
        await store.allocate("pool", "a", "p", 1, [], 3)
    with pytest.raises(StaleHolder):
        await store.release("pool", "a", 2)
    await store.release("pool", "a", 1)

    clock.now_s += 1
    with pytest.raises(StaleHolder):
        await store.release("pool", "a", 1)  # nobody remembers it
    assert (await store.allocate("pool", "a", "p", 1, [], 3)).block_ids == (0, 1, 2)


async def test_allocate_again_is_stale_once_the_holder_moved_on(store: BlockStore) -> None:
    with pytest.raises(StaleHolder):
        await store.allocate("pool", "a", "d", 1, [], 3)
    await store.detach("pool", "a", 1)
    with pytest.raises(StaleHolder):
        await store.allocate("pool", "a", "p", 1, [], 3)


async def test_a_waiter_holds_nothing_to_release(store: BlockStore) -> None:
    with pytest.raises(OutOfBlocks):
        await store.allocate("pool", "b", "p", 2, [], 9)
    with pytest.raises(StaleHolder):
        await store.release("pool", "b", 1)
    with pytest.raises(BlockStoreError, match="b holds nothing"):
        await store.detach("pool", "b", 1)


async def test_a_ticket_is_claimed_with_the_blocks_that_its_holder_has(store: BlockStore) -> None:
    """Or with some of them: the answer has the holder's other blocks, and how often it acquired
    any. A ticket with another holder's block, or a returned one, is refused, and no worker gets
    it."""
    await store.extend("pool", "p", [Growth("a", 1, have=3, total=5)])
    await store.give_back("pool", "a", 1, [3, 1])
    await store.extend("pool", "p", [Growth("a", 1, have=5, total=6)])  # 1 again
    await store.detach("pool", "a", 1)
    for wrong in ([3], [7], [0, 1, 2, 3, 4], [0, 7]):
        with pytest.raises(NotHeld):
            await store.claim("pool", "a", 2, "d", wrong)
    assert (await store.holders("pool"))[0].worker_id == "p"
    claims = [await store.claim("pool", "a", 2, "d", [2, 0]) for _ in range(2)]
    assert claims == [Claim(3, num_acquired=6, block_ids=(0, 2, 4, 1))] * 2
    with pytest.raises(NotHeld):
        await store.claim("pool", "a", 2, "d", [0, 7])


async def test_impossible_arguments_are_refused(store: BlockStore) -> None:
    """Before anything else is checked; tests/fuzz has more of them."""
    refused = [
        store.allocate("pool", "", "p", 1, [], 1),
        store.allocate("pool", "b", "p", -1, [], 1),
        store.allocate("pool", "b", "p", 1, [A, A], 3),
        store.allocate("pool", "b", "p", 1, [A], 0),
        store.allocate("pool", "b", "p", 1, [b"short"], 1),
        store.extend("pool", "p", [Growth("a", 1, have=4, total=3)]),
        store.commit("pool", "a", 1, [(0, A), (0, b"b" * 16)]),
        store.release("pool", "a", 2**53),
    ]
    for call in refused:
        with pytest.raises(InvalidArgument):
            await call
    assert [holder.num_blocks for holder in await store.holders("pool")] == [3]
