"""The blocks and the time that each tenant is charged for, in a pool of 11 blocks."""

from dataclasses import replace

import pytest

from blockstore.memory_store import MemoryStore
from blockstore.records import Asserted, Content, Share
from blockstore.store import BlockStore, tenant_of
from tests.clock import Clock
from tests.unit.test_memory_store import POOL, A, B, X, allocate, counts


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(clock: Clock) -> BlockStore:
    return await prepare(MemoryStore(clock))


async def prepare(store: BlockStore) -> BlockStore:
    await store.register_pool(POOL)
    await store.register_worker(POOL, "w")
    return store


async def used(store: BlockStore) -> dict[str, int]:
    """The blocks of each tenant, after an audit that found nothing."""
    await counts(store)
    shares = (await store.stats("pool")).shares
    return {share.tenant: share.num_blocks for share in shares if share.num_blocks}


def test_a_holder_names_its_tenant() -> None:
    assert tenant_of("acme/0f2c+") == "acme"
    assert [tenant_of(each) for each in ("0f2c", "/0f2c", "~/0f2c")] == ["~", "~", "~"]


async def test_a_block_that_requests_share_is_charged_once(store: BlockStore) -> None:
    """Until the last of them leaves; then it is cached, and nobody's."""
    await allocate(store, "acme/1", 2)
    await store.commit("pool", "acme/1", 1, [(0, A), (1, B)])
    await allocate(store, "acme/2", 4, (A, B))
    await allocate(store, "beta/1", 3)
    await allocate(store, "0f2c", 1)
    assert await used(store) == {"acme": 4, "beta": 3, "~": 1}

    await store.release("pool", "acme/1", 1)
    assert await used(store) == {"acme": 4, "beta": 3, "~": 1}
    await store.give_back("pool", "acme/2", 1, [0, 3])
    await store.release("pool", "beta/1", 1)
    assert await used(store) == {"acme": 2, "~": 1}


async def test_a_cached_block_is_charged_to_the_owner_who_retains_it(store: BlockStore) -> None:
    """Until it is held again, is evicted, or its retention ends."""
    await allocate(store, "acme/1", 3)
    await store.commit("pool", "acme/1", 1, [(0, A), (1, B), (2, X)])
    await store.retain("pool", "acme", "p", 60_000, [A, B], (9, 9))
    await store.retain("pool", "acme", "q", 60_000, [X], (9, 9))
    assert await used(store) == {"acme": 3}
    await store.release("pool", "acme/1", 1)
    assert await used(store) == {"acme": 3}
    await store.end_retention("pool", "acme", "q")
    assert await used(store) == {"acme": 2}
    await allocate(store, "acme/2", 2, (A,))
    assert await used(store) == {"acme": 3}
    await allocate(store, "beta/1", 9)
    assert await used(store) == {"acme": 2, "beta": 9}
    await store.release("pool", "acme/2", 1)
    await store.retract("pool", 0, A)
    assert await used(store) == {"beta": 9}


async def test_a_dead_workers_blocks_are_charged_no_longer(store: BlockStore) -> None:
    await allocate(store, "acme/1", 2)
    await store.reap("pool", "w")
    assert await used(store) == {}


async def test_the_time_of_all_shares_is_that_of_the_pool(clock: Clock, store: MemoryStore) -> None:
    await allocate(store, "acme/1", 2)
    clock.advance(1.5)
    await allocate(store, "beta/1", 1)
    clock.advance(10)
    await store.release("pool", "acme/1", 1)
    clock.advance(0.25)
    found = (await store.stats("pool")).shares
    assert {share.tenant: share.block_ms for share in found} == {"acme": 23_000, "beta": 10_250}
    assert store.ledger("pool").blocks.shares.pool.block_ms(111_750) == 33_250
    await counts(store)


async def test_an_audit_finds_a_block_of_two_tenants_and_a_wrong_share() -> None:
    store = MemoryStore(Clock())
    await prepare(store)
    await allocate(store, "acme/1", 1)
    await store.commit("pool", "acme/1", 1, [(0, A)])
    await allocate(store, "beta/1", 1, (A,))
    account = store.ledger("pool").blocks.shares.tenants["acme"]
    account.num_blocks, account.starts = 3, account.starts + 7
    assert (await store.audit("pool")).violations == (
        "block 0 is held for the tenants acme and beta",
        "acme uses 1 blocks, but is charged for 3",
        "the uses of tenants' blocks start at 100007 ms, not 100000",
    )


async def test_a_quarantine_pays_for_what_nobody_else_held() -> None:
    """Also if the holder that shares a block with it ends first."""
    store, private = MemoryStore(), Content(private=True)
    await store.recover_pool(POOL, 2, ["v", "w"])
    mine = Asserted("acme/1", 1, 1, 0, (0, 1))
    await store.reassert(POOL, "v", [mine, replace(mine, holder_id="acme/2", block_ids=(2,))], [])
    await store.fence("pool", "w")
    await store.restore("pool", 0, [private, Content(A), private, private, *[Content()] * 7])
    await store.reopen("pool")
    assert await used(store) == {"acme": 3, "~": 1}
    await store.release("pool", "acme/1", 1)
    assert await used(store) == {"acme": 2, "~": 1}  # block 0 stays with the quarantine
    await store.reap("pool", "w")
    assert await used(store) == {"acme": 1}
    assert Share("acme", 1, 0) in (await store.stats("pool")).shares
