"""Workers join, are fenced, leave and die; and the violations that an audit finds."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from blockstore.errors import (
    FingerprintMismatch,
    GeometryMismatch,
    LeaseHeld,
    OutOfBlocks,
    StaleHolder,
    UnknownPool,
    UnknownWorker,
    WorkerFenced,
    WorkerNotEmpty,
)
from blockstore.memory.ledger import Ledger
from blockstore.memory.recount import audit
from blockstore.memory.waiters import Waiter
from blockstore.memory_store import MemoryStore
from blockstore.records import Growth, Heartbeat, PoolSpec
from blockstore.store import TOMBSTONE_S, BlockStore
from tests.clock import Clock

POOL = PoolSpec("pool", "model", "fingerprint", num_blocks=11, block_size=4, block_bytes=64)
A, B = b"a" * 16, b"b" * 16


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def empty() -> BlockStore:
    return MemoryStore()


@pytest.fixture
async def store(clock: Clock) -> BlockStore:
    return await prepare(MemoryStore(clock))


async def prepare(store: BlockStore) -> BlockStore:
    """v runs `a` (blocks 0, 1), has `r` (2, 3) at rest; w runs `b` (0 shared, 4)."""
    await store.register_pool(POOL)
    await store.register_worker(POOL, "v")
    await store.register_worker(POOL, "w")
    await store.allocate("pool", "a", "v", 1, [], 2)
    await store.commit("pool", "a", 1, [(0, A), (1, B)])
    await store.allocate("pool", "r", "v", 2, [], 2)
    await store.detach("pool", "r", 1)
    await store.allocate("pool", "b", "w", 3, [A], 2)
    return store


@pytest.mark.parametrize(
    ("other", "name"),
    [
        (replace(POOL, block_size=7), "block_size"),
        (replace(POOL, num_blocks=7), "num_blocks"),
        (replace(POOL, block_bytes=7), "block_bytes"),
    ],
)
async def test_geometry_must_be_the_pools(store: BlockStore, other: PoolSpec, name: str) -> None:
    """It is checked before the fingerprint, since its message says more."""
    with pytest.raises(GeometryMismatch, match=f"{name} is .* in the pool, 7 in x"):
        await store.register_worker(replace(other, fingerprint="bf16"), "x")


async def test_fingerprint_must_be_the_pools(store: BlockStore) -> None:
    with pytest.raises(FingerprintMismatch, match=r"fingerprint.*bf16"):
        await store.register_worker(replace(POOL, fingerprint="bf16"), "x")


async def test_a_fenced_worker_may_only_release(store: BlockStore) -> None:
    await store.fence("pool", "v")
    await store.fence("pool", "v")
    assert await store.heartbeat("pool", "v") == Heartbeat(fenced=True, demands=())
    assert (await store.stats("pool")).fenced_worker_ids == ("v",)
    for attempt in (
        store.register_worker(POOL, "v"),
        store.allocate("pool", "a", "v", 1, [], 2),
        store.allocate("pool", "new", "v", 1, [], 2),
        store.extend("pool", "v", [Growth("a", 1, 2, 3)]),
        store.commit("pool", "a", 1, [(0, A)]),
        store.detach("pool", "a", 1),
        store.claim("pool", "r", 2, "v"),
    ):
        with pytest.raises(WorkerFenced):
            await attempt

    await store.give_back("pool", "a", 1, [1])
    await store.release("pool", "a", 1)
    await store.release("pool", "r", 2)
    await store.leave("pool", "v")


async def test_a_fenced_workers_blocks_are_quarantined(store: BlockStore) -> None:
    """Its running requests cannot be claimed, and its blocks are given to no one; its tickets at
    rest can continue elsewhere."""
    await store.fence("pool", "v")
    with pytest.raises(StaleHolder):
        await store.claim("pool", "a", 1, "w")
    assert (await store.claim("pool", "r", 2, "w")).epoch == 3

    rest = await store.allocate("pool", "c", "w", 4, [], 6)
    assert not {0, 1} & set(rest.block_ids)
    assert (await store.stats("pool")).num_free == 0


async def test_reaping_restores_conservation(store: BlockStore) -> None:
    """Shared blocks stay with the others; the last holder in order is released first."""
    assert await store.reap("pool", "v") == 2
    assert await store.reap("pool", "v") == 0

    report = await store.audit("pool")
    assert report.violations == ()
    assert (report.num_free, report.num_cached, report.num_held) == (8, 1, 2)
    assert [holder.holder_id for holder in await store.holders("pool")] == ["b"]
    assert (await store.allocate("pool", "c", "w", 4, [], 3)).block_ids == (2, 3, 5)


async def test_a_reaped_worker_cannot_join_again(store: BlockStore, clock: Clock) -> None:
    """An operation that a dead worker sent arrives after it was reaped: it has no effect."""
    await store.reap("pool", "v")
    for attempt in (
        store.register_worker(POOL, "v"),
        store.allocate("pool", "late", "v", 1, [], 1),
        store.extend("pool", "v", [Growth("a", 1, 2, 3)]),
        store.claim("pool", "r", 2, "v"),
        store.heartbeat("pool", "v"),
        store.fence("pool", "v"),
    ):
        with pytest.raises(UnknownWorker):
            await attempt
    with pytest.raises(StaleHolder):
        await store.commit("pool", "a", 1, [(0, A)])
    with pytest.raises(StaleHolder):
        await store.allocate("pool", "r", "w", 2, [], 1)
    await store.release("pool", "a", 1)

    clock.now_s += TOMBSTONE_S
    await store.register_worker(POOL, "v")


async def test_only_an_empty_worker_leaves(store: BlockStore) -> None:
    with pytest.raises(WorkerNotEmpty, match="1 holders and 0 waiters"):
        await store.leave("pool", "w")
    await store.release("pool", "b", 1)
    with pytest.raises(OutOfBlocks):
        await store.allocate("pool", "c", "w", 4, [], 11)
    with pytest.raises(WorkerNotEmpty, match="0 holders and 1 waiters"):
        await store.leave("pool", "w")
    await store.withdraw("pool", "c")
    await store.leave("pool", "w")
    await store.leave("pool", "w")
    assert (await store.stats("pool")).worker_ids == ("v",)
    await store.register_worker(POOL, "w")


async def test_all_calls_need_their_pool(empty: BlockStore) -> None:
    store = empty
    for attempt in (
        store.register_worker(POOL, "v"),
        store.fence("pool", "v"),
        store.leave("pool", "v"),
        store.heartbeat("pool", "v"),
        store.allocate("pool", "a", "v", 1, [], 1),
        store.withdraw("pool", "a"),
        store.extend("pool", "v", []),
        store.commit("pool", "a", 1, []),
        store.retract("pool", 0, A),
        store.detach("pool", "a", 1),
        store.claim("pool", "a", 2, "v"),
        store.give_back("pool", "a", 1, []),
        store.release("pool", "a", 1),
        store.match("pool", []),
        store.holders("pool"),
        store.stats("pool"),
        store.reap("pool", "v"),
        store.audit("pool"),
        store.wait_for_room("pool", 1),
    ):
        with pytest.raises(UnknownPool):
            await attempt
    await store.drop_pool("pool")
    assert await store.pool_ids() == ()
    await store.close()


def lost_block(ledger: Ledger) -> None:
    ledger.blocks.returned.remove(1)


def block_in_two_places(ledger: Ledger) -> None:
    ledger.blocks.returned.append(2)


def wrong_ref_count(ledger: Ledger) -> None:
    ledger.blocks.refs[2] += 1


def index_to_a_free_block(ledger: Ledger) -> None:
    ledger.blocks.index[B] = 1


def cached_without_hash(ledger: Ledger) -> None:
    del ledger.blocks.hash_of[0], ledger.blocks.index[A]


def holder_without_worker(ledger: Ledger) -> None:
    del ledger.workers["v"]


def demand_without_holder(ledger: Ledger) -> None:
    ledger.demands.add("gone")


@pytest.mark.parametrize(
    ("break_it", "sentences"),
    [
        (lost_block, {"free 8 + cached 1 + held 1 is not 11", "block 1 is in 0 places, not in 1"}),
        (
            block_in_two_places,
            {"free 10 + cached 1 + held 1 is not 11", "block 2 is in 2 places, not in 1"},
        ),
        (wrong_ref_count, {"block 2 has 1 holders, but its ref count is 2"}),
        (
            index_to_a_free_block,
            {
                "2 hashes are indexed, 1 blocks carry one",
                f"hash {B.hex()} leads to block 1, which does not carry it",
                "block 1 is indexed, but neither held nor cached",
            },
        ),
        (cached_without_hash, {"block 0 is cached without a hash"}),
        (holder_without_worker, {"holder b has worker v, which is not there"}),
        (demand_without_holder, {"holder gone is demanded, but holds nothing"}),
    ],
)
def test_audit_says_what_is_wrong(break_it: Callable[[Ledger], None], sentences: set[str]) -> None:
    """1 is free, 0 is cached with hash A, 2 is held by b."""
    ledger = Ledger(POOL, Clock())
    ledger.register_worker(POOL, "v")
    ledger.allocate("a", "v", 1, [], 2)
    ledger.commit("a", 1, [(0, A)])
    ledger.allocate("b", "v", 2, [], 1)
    ledger.release("a", 1)
    assert audit(ledger).violations == ()

    break_it(ledger)
    assert set(audit(ledger).violations) == sentences


def test_audit_names_a_waiter_whose_worker_is_gone() -> None:
    ledger = Ledger(POOL, Clock())
    ledger.register_worker(POOL, "v")
    ledger.waiters["a"] = Waiter(order=1, worker_id="x")

    assert audit(ledger).violations == ("waiter a has worker x, which is gone or fenced",)


async def test_a_member_on_another_host_is_reaped_when_its_lease_has_ended(
    store: BlockStore, clock: Clock
) -> None:
    await store.register_worker(POOL, "far", lease_ms=1000)
    await store.allocate("pool", "f", "far", 4, [A], 1)
    clock.now_s += 0.9
    with pytest.raises(LeaseHeld, match="100 ms"):
        await store.reap("pool", "far")
    await store.register_worker(POOL, "far", lease_ms=1000)
    clock.now_s += 0.9
    with pytest.raises(LeaseHeld):
        await store.reap("pool", "far")
    clock.now_s += 0.2
    assert await store.reap("pool", "far") == 1
    with pytest.raises(UnknownWorker):
        await store.register_worker(POOL, "far", lease_ms=1000)


async def test_a_member_that_has_left_has_no_lease(store: BlockStore) -> None:
    await store.register_worker(POOL, "far", lease_ms=60_000)
    await store.leave("pool", "far")
    assert await store.reap("pool", "far") == 0
