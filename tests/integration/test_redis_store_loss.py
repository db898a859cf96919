"""A server that has lost its data is not the server that the store knows, even with the same
address."""

import asyncio

import pytest

from blockstore.errors import StoreLost, UnknownPool
from blockstore.records import PoolSpec
from blockstore.redis_registry import RedisRegistry
from blockstore.redis_store import RedisStore
from tests.conftest import Valkey
from tests.secret import SECRET

POOL = PoolSpec("pool", "model", "fingerprint", num_blocks=11, block_size=4, block_bytes=64)


async def assert_lost(store: RedisStore) -> None:
    """Every kind of call about the pool fails, and keeps failing."""
    for _ in range(2):
        for call in (
            store.withdraw("pool", "h"),
            store.stats("pool"),
            store.wait_for_room("pool", 0.01),
            store.register_pool(POOL),
        ):
            with pytest.raises(StoreLost):
                await call


async def test_a_server_that_was_restarted_has_lost_the_store(own_valkey: Valkey) -> None:
    store = await RedisStore.connect(own_valkey.url)
    registry = await RedisRegistry.connect(own_valkey.url, SECRET.registry_key)
    await store.register_pool(POOL)
    arrival = await registry.next_arrival()
    own_valkey.kill()
    own_valkey.start()
    await assert_lost(store)
    assert await registry.next_arrival() > arrival
    await store.close()
    await registry.close()

    anew = await RedisStore.connect(own_valkey.url)
    with pytest.raises(UnknownPool):
        await anew.stats("pool")
    await anew.close()


async def test_a_store_without_pools_follows_a_restart_as_the_registry_does(
    own_valkey: Valkey,
) -> None:
    """A gateway and a block manager join no pool. So it makes no difference to them on which side
    of a restart each of their two connections was opened."""
    store = await RedisStore.connect(own_valkey.url)
    with pytest.raises(UnknownPool):
        await store.stats("pool")
    own_valkey.kill()
    own_valkey.start()
    registry = await RedisRegistry.connect(own_valkey.url, SECRET.registry_key)
    assert store.run_id != registry.run_id
    worker = await RedisStore.connect(own_valkey.url)
    await worker.register_pool(POOL)
    assert await store.pool_ids() == ("pool",)
    assert (await store.stats("pool")).num_free == POOL.num_blocks
    assert await store.match("pool", [b"h" * 16]) == 0
    assert store.run_id == registry.run_id
    assert await registry.next_arrival()
    for each in (store, registry, worker):
        await each.close()


async def test_calls_in_flight_raise_store_lost(own_valkey: Valkey) -> None:
    """Also calls that were submitted while the server was away, and waiting ones."""
    store = await RedisStore.connect(own_valkey.url)
    await store.register_pool(POOL)
    await store.register_worker(POOL, "w")
    await store.wait_for_room("pool", 0.05)
    waiting = asyncio.create_task(store.wait_for_room("pool", 60))
    await asyncio.sleep(0)
    own_valkey.kill()
    calls = [asyncio.create_task(store.allocate("pool", h, "w", 1, [], 2)) for h in "abc"]
    await asyncio.sleep(0)
    own_valkey.start()
    async with asyncio.timeout(5):
        results = await asyncio.gather(waiting, *calls, return_exceptions=True)
    assert {type(result) for result in results} == {StoreLost}
    await store.close()


async def test_a_restart_with_an_old_state_is_a_loss(own_valkey: Valkey) -> None:
    """Workers that know the pool refuse one that was restored from a file, and so do new ones."""
    store = await RedisStore.connect(own_valkey.url)
    await store.register_pool(POOL)
    own_valkey.command("SAVE")
    own_valkey.kill()
    own_valkey.start()
    assert own_valkey.command("EXISTS", "{pool}:pool") == 1
    await assert_lost(store)
    await store.close()

    anew = await RedisStore.connect(own_valkey.url)
    with pytest.raises(UnknownPool, match="older than the server's restart"):
        await anew.stats("pool")
    with pytest.raises(StoreLost, match="older than the server's restart"):
        await anew.register_worker(POOL, "w")
    await anew.close()


async def test_an_old_state_can_be_dropped_and_rebuilt(own_valkey: Valkey) -> None:
    for _ in range(2):
        store = await RedisStore.connect(own_valkey.url)
        await store.drop_pool("pool")
        await store.register_pool(POOL)
        own_valkey.command("SAVE")
        own_valkey.kill()
        own_valkey.start()
        await store.close()


async def test_a_flushed_server_has_lost_the_store(valkey: Valkey) -> None:
    """A pool that this store made cannot be unknown; one that it never accessed can."""
    store = await RedisStore.connect(valkey.url)
    await store.register_pool(POOL)
    with pytest.raises(UnknownPool):
        await store.stats("other")
    valkey.command("FLUSHALL")
    with pytest.raises(StoreLost, match="pool pool is gone"):
        await store.withdraw("pool", "h")
    await assert_lost(store)
    await store.close()


async def test_a_pool_that_the_store_dropped_itself_is_no_loss(valkey: Valkey) -> None:
    store = await RedisStore.connect(valkey.url)
    await store.register_pool(POOL)
    await store.drop_pool("pool")
    with pytest.raises(UnknownPool):
        await store.stats("pool")
    await store.register_pool(POOL)
    assert await store.pool_ids() == ("pool",)
    await store.close()


async def test_a_lost_store_stays_lost(valkey: Valkey) -> None:
    """No caller retries what cannot succeed."""
    store = await RedisStore.connect(valkey.url)
    await store.register_pool(POOL)
    valkey.command("FLUSHALL")
    with pytest.raises(StoreLost):
        await store.withdraw("pool", "h")
    store._link("pool").server.mark_in_doubt()
    async with asyncio.timeout(5):
        await assert_lost(store)
    await store.close()


async def test_missing_functions_are_a_loss(own_valkey: Valkey) -> None:
    store = await RedisStore.connect(own_valkey.url)
    await store.register_pool(POOL)
    own_valkey.command("FUNCTION", "FLUSH")
    with pytest.raises(StoreLost, match="functions"):
        await store.stats("pool")
    await store.close()
