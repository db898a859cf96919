"""Properties of the store in Redis only; tests/property compares it with `MemoryStore` step by
step."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from blockstore.errors import (
    BlockStoreError,
    LedgerError,
    NotHeld,
    OutOfBlocks,
    StaleHolder,
    StoreUnavailable,
    UnknownPool,
    WorkerFenced,
)
from blockstore.records import Allocation, Growth, PoolSpec
from blockstore.redis_store import RedisStore
from blockstore.store import FUNCTION_LIBRARY
from tests.conftest import Valkey

POOL = PoolSpec("pool", "model", "fingerprint", num_blocks=11, block_size=4, block_bytes=64)
LARGE = PoolSpec("large", "model", "fingerprint", num_blocks=6000, block_size=4, block_bytes=64)


def hashes(num: int, salt: int = 0) -> list[bytes]:
    return [salt.to_bytes(8, "big") + number.to_bytes(8, "big") for number in range(num)]


@pytest.fixture
async def store(valkey: Valkey) -> AsyncIterator[RedisStore]:
    """A small and a large pool, each with worker w."""
    store = await RedisStore.connect(valkey.url)
    for spec in (POOL, LARGE):
        await store.register_pool(spec)
        await store.register_worker(spec, "w")
    yield store
    await store.close()


# Concurrent callers


async def test_concurrent_calls_are_executed_in_the_order_of_submission(store: RedisStore) -> None:
    """Each allocation takes the next blocks, without a wait for the one before."""
    calls = [store.allocate("large", f"h{n}", "w", n, [], 2) for n in range(500)]
    allocations = await asyncio.gather(*calls)
    assert [a.block_ids for a in allocations] == [(2 * n, 2 * n + 1) for n in range(500)]


async def test_a_call_is_executed_though_its_caller_was_cancelled(store: RedisStore) -> None:
    """A caller that is cancelled while it releases has released."""
    await store.allocate("pool", "a", "w", 1, [], 2)
    releasing = asyncio.create_task(store.release("pool", "a", 1))
    await asyncio.sleep(0)  # it has been submitted
    releasing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await releasing
    await store.heartbeat("pool", "w")
    await store.withdraw("pool", "nobody")  # whatever was submitted before has been executed
    assert (await store.stats("pool")).num_held == 0


async def test_closing_finishes_what_was_submitted(store: RedisStore, valkey: Valkey) -> None:
    other = await RedisStore.connect(valkey.url)
    await other.stats("pool")
    allocating = asyncio.create_task(other.allocate("pool", "a", "w", 1, [], 2))
    await asyncio.sleep(0)
    await other.close()
    assert (await allocating).block_ids == (0, 1)
    with pytest.raises(StoreUnavailable, match="closed"):
        await other.stats("pool")


# Sizes


async def test_calls_of_thousands_of_blocks(store: RedisStore) -> None:
    """Everywhere more than one variadic call in Lua can take."""
    mine = hashes(2000)
    first = await store.allocate("large", "a", "w", 1, mine, 2500)
    assert first.block_ids == tuple(range(2500))
    published = await store.commit("large", "a", 1, list(zip(first.block_ids, mine, strict=False)))
    assert published == (True,) * 2000
    assert await store.match("large", [*mine, *hashes(3, salt=1)]) == 2000

    second = await store.allocate("large", "b", "w", 2, mine, 2001)
    assert second == Allocation("b", 1, (*range(2000), 2500), 2000)
    extension = await store.extend("large", "w", [Growth("b", 1, 2001, 5400)])
    assert extension.grown[0].block_ids == tuple(range(2501, 5900))

    await store.give_back("large", "b", 1, second.block_ids)
    assert [info.num_blocks for info in await store.holders("large")] == [2500, 3399]
    await store.release("large", "b", 1)
    await store.release("large", "a", 1)
    stats = await store.stats("large")
    assert (stats.num_free, stats.num_cached, stats.num_held) == (4000, 2000, 0)
    assert (await store.allocate("large", "c", "w", 3, [], 6000)).num_cached_blocks == 0
    assert (await store.audit("large")).violations == ()


async def test_thousands_of_holders_are_listed_in_order_and_reaped(store: RedisStore) -> None:
    """Reaping and listing use pages."""
    calls = [store.allocate("large", f"h{n}", "w", 2500 - n, [], 2) for n in range(2500)]
    await asyncio.gather(*calls)
    infos = await store.holders("large")
    assert [info.order for info in infos] == list(range(1, 2501))
    assert await store.reap("large", "w") == 2500
    stats = await store.stats("large")
    assert (stats.num_free, stats.num_holders, stats.worker_ids) == (6000, 0, ())
    assert await store.reap("large", "w") == 0


async def test_a_worker_being_reaped_gets_nothing_between_two_pages(
    store: RedisStore, valkey: Valkey
) -> None:
    calls = [store.allocate("large", f"h{n}", "w", n, [], 2) for n in range(1000)]
    await asyncio.gather(*calls)
    num_released, more = valkey.command("FCALL", f"{FUNCTION_LIBRARY}_reap", 1, "{large}", "w")
    assert (num_released, more) == (512, 1)
    with pytest.raises(WorkerFenced):
        await store.allocate("large", "late", "w", 1000, [], 2)
    assert await store.reap("large", "w") == 1000 - 512


async def test_the_largest_order_survives(store: RedisStore) -> None:
    """Orders have 52 bits, which a score holds exactly."""
    await store.allocate("pool", "a", "w", 2**52 - 1, [], 1)
    await store.allocate("pool", "b", "w", 2**52 - 2, [], 1)
    await store.allocate("pool", "first", "w", 0, [], 1)
    answer = await store.extend("pool", "w", [Growth("first", 1, 1, POOL.num_blocks)])
    assert answer.demands == ("a",)
    assert (await store.holders("pool"))[-1].order == 2**52 - 1


async def test_order_does_not_depend_on_the_servers_locale(own_valkey: Valkey) -> None:
    """Ids of equal order are sorted by their bytes, also under a locale that sorts otherwise."""
    store = await RedisStore.connect(own_valkey.url)
    await store.register_pool(POOL)
    ids = ["A", "a", "B", "b", "é", "ab"]
    for number, holder_id in enumerate(ids):
        await store.register_worker(POOL, f"w{number}")
        await store.allocate("pool", holder_id, f"w{number}", 1, [], 1)
    await store.register_worker(POOL, "w")
    await store.allocate("pool", "first", "w", 0, [], 1)
    seen: list[str] = []
    while len(seen) < len(ids):
        await store.extend("pool", "w", [Growth("first", 1, 1, POOL.num_blocks)])
        beats = [await store.heartbeat("pool", f"w{number}") for number in range(len(ids))]
        (last,) = (holder_id for beat in beats for holder_id in beat.demands)
        seen.append(last)
        await store.release("pool", last, 1)
    assert seen == sorted(ids, reverse=True)
    await store.close()


# Wrong types


async def test_an_argument_of_a_wrong_type_is_refused_before_it_is_sent(store: RedisStore) -> None:
    with pytest.raises(TypeError):
        await store.allocate("pool", "a", "w", 1, [None], 1)  # type: ignore[list-item]
    assert (await store.stats("pool")).num_holders == 0


async def test_a_key_of_another_type_is_an_error_of_the_server_not_of_the_ledger(
    store: RedisStore, valkey: Valkey
) -> None:
    valkey.command("SET", "{pool}:returned", "text")
    with pytest.raises(BlockStoreError, match="WRONGTYPE") as failed:
        await store.allocate("pool", "a", "w", 1, [], 1)
    assert not isinstance(failed.value, LedgerError)
    assert (await store.allocate("large", "a", "w", 1, [], 1)).block_ids == (0,)


async def test_errors_carry_numbers_and_names(store: RedisStore) -> None:
    with pytest.raises(OutOfBlocks) as short:
        await store.allocate("pool", "a", "w", 1, [], 12)
    assert (short.value.needed, short.value.available) == (12, 11)
    await store.allocate("pool", "a", "w", 1, [], 1)
    with pytest.raises(StaleHolder, match="a is at epoch 1 not 3"):
        await store.release("pool", "a", 3)
    with pytest.raises(NotHeld, match="block 7 is not held by a"):
        await store.commit("pool", "a", 1, [(7, hashes(1)[0])])


# Forgetting


async def test_dropping_a_pool_leaves_no_key(store: RedisStore, valkey: Valkey) -> None:
    """Holders, waiters, caches and tombstones are removed, and nothing of other pools."""
    await store.drop_pool("large")
    keys_before = set(valkey.command("KEYS", "*"))
    await store.register_pool(LARGE)
    await store.register_worker(LARGE, "w")
    held = await asyncio.gather(
        *(store.allocate("large", f"h{n}", "w", n, [], 2) for n in range(1500))
    )
    await store.commit("large", "h0", 1, list(zip(held[0].block_ids, hashes(2), strict=True)))
    await store.release("large", "h0", 1)
    with pytest.raises(OutOfBlocks):
        await store.allocate("large", "waiter", "w", 1, [], 6001)
    await store.reap("large", "gone")
    await store.drop_pool("large")
    assert set(valkey.command("KEYS", "*")) == keys_before
    with pytest.raises(UnknownPool):
        await store.stats("large")


async def test_tombstones_end_after_their_time_and_do_not_pile_up(
    store: RedisStore, valkey: Valkey
) -> None:
    """The test makes the first three ten minutes old."""
    for name in "abcde":
        await store.allocate("pool", name, "w", 1, [], 1)
        await store.release("pool", name, 1)
    with pytest.raises(StaleHolder, match="released"):
        await store.allocate("pool", "a", "w", 1, [], 1)
    tombs = valkey.command("HVALS", "{pool}:tombs")
    now_ms = valkey.command("TIME")[0] * 1000
    assert all(590_000 < int(tomb.split()[1]) - now_ms <= 601_000 for tomb in tombs)

    for name in "abc":
        valkey.command("HSET", "{pool}:tombs", f"h:{name}", f"1 {now_ms - 1}")
    assert (await store.allocate("pool", "a", "w", 1, [], 1)).block_ids == (0,)
    await store.release("pool", "a", 1)
    await store.reap("pool", "gone")
    assert valkey.command("LLEN", "{pool}:graves") == valkey.command("HLEN", "{pool}:tombs") == 4


# Waiting for room


async def test_waiters_of_all_stores_wake_when_blocks_are_freed(
    store: RedisStore, valkey: Valkey
) -> None:
    """Blocks that become free and blocks that become cached are both announced."""
    others = [await RedisStore.connect(valkey.url) for _ in range(2)]
    for end in ("release", "give_back"):
        await store.allocate("pool", end, "w", 1, [], 2)
        await asyncio.gather(*(other.wait_for_room("pool", 0.05) for other in others))
        waits = [asyncio.create_task(other.wait_for_room("pool", 60)) for other in others * 3]
        done, _ = await asyncio.wait(waits, timeout=0.05)
        assert not done
        if end == "release":
            await store.release("pool", end, 1)
        else:
            await store.give_back("pool", end, 1, [0])
        async with asyncio.timeout(5):
            await asyncio.gather(*waits)
    for other in others:
        await other.close()


async def test_the_end_of_a_wait_is_announced_to_those_behind(store: RedisStore) -> None:
    """A request that was refused only because of an earlier waiter may now be served."""
    with pytest.raises(OutOfBlocks):
        await store.allocate("pool", "first", "w", 1, [], 12)
    await store.wait_for_room("pool", 0.05)  # listening from here on
    waiting = asyncio.create_task(store.wait_for_room("pool", 60))
    await asyncio.sleep(0)
    await store.withdraw("pool", "first")
    async with asyncio.timeout(5):
        await waiting


async def test_a_pool_that_was_unknown_at_first_can_be_waited_for_later(store: RedisStore) -> None:
    later = replace(POOL, pool_id="later")
    with pytest.raises(UnknownPool):
        await store.wait_for_room("later", 0.05)
    await store.register_pool(later)
    await store.register_worker(later, "w")
    await store.allocate("later", "a", "w", 1, [], 1)
    await store.wait_for_room("pool", 0.05)
    await store.wait_for_room("later", 0.05)
    waiting = asyncio.create_task(store.wait_for_room("later", 60))
    await asyncio.sleep(0)
    await store.release("later", "a", 1)
    async with asyncio.timeout(5):
        await waiting
