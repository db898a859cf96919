"""Workers whose server lost everything report their holders and go on; calls meanwhile wait, and
are answered."""

import asyncio
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from blockstore.errors import LedgerError, OutOfBlocks, StoreLost, WorkerFenced
from blockstore.hashing import next_hash
from blockstore.records import Growth
from blockstore.redis_store import RedisStore
from services.pool.directory import PoolDirectory
from tests.conftest import Valkey
from tests.integration.ledger_workers import (
    LIMIT_S,
    NUM_BLOCKS,
    Worker,
    assert_whole,
    joined,
    make_directory,
)
from tests.waiting import until

ROOT = b"r" * 16
TOKENS = (1, 2, 3, 4), (5, 6, 7, 8)
A = next_hash(ROOT, TOKENS[0])
B = next_hash(A, TOKENS[1])


@pytest.fixture
def directory(tmp_path: Path) -> PoolDirectory:
    return make_directory(tmp_path)


def restart(valkey: Valkey) -> None:
    valkey.kill()
    valkey.start()


def flush(valkey: Valkey) -> None:
    valkey.command("FLUSHALL")


def flush_all_there_is(valkey: Valkey) -> None:
    valkey.command("FLUSHALL")
    valkey.command("FUNCTION", "FLUSH")


LOSSES = pytest.mark.parametrize("lose", [restart, flush, flush_all_there_is])
Lose = Callable[[Valkey], None]


@LOSSES
async def test_work_goes_on_where_it_was(
    own_valkey: Valkey, directory: PoolDirectory, lose: Lose
) -> None:
    """Holders keep their blocks, tickets can be claimed, and finished blocks are found again."""
    async with joined(own_valkey.url, directory, "v", "w") as (v, w):
        blocks = await v.allocate("a", 1, 3)
        v.stamps.complete(blocks[0], A, ROOT, TOKENS[0])
        v.stamps.complete(blocks[1], B, A, TOKENS[1])
        await v.store.commit("pool", "a", 1, [(blocks[0], A), (blocks[1], B)])
        await v.allocate("gone", 2, 2)
        await v.store.release("pool", "gone", 1)
        at_rest = await v.allocate("t", 3, 2)
        await v.store.detach("pool", "t", 1)
        lose(own_valkey)

        assert (await w.store.claim("pool", "t", 2, "w")).epoch == 3
        assert not set(await v.grow("a", 1, 3, 4)) & {*blocks, *at_rest}
        assert await w.store.match("pool", [A, B]) == 2
        found = await w.store.allocate("pool", "n", "w", 4, [A, B], 3)
        assert found.block_ids[:2] == blocks[:2]
        await v.store.release("pool", "a", 1)
        assert (await v.store.heartbeat("pool", "v")).demands == ()
        await assert_whole([v, w])
        assert directory.read_header().ledger_epoch == 2
        assert (await v.store.stats("pool")).ledger_epoch == 2


async def test_an_old_state_is_not_used(own_valkey: Valkey, directory: PoolDirectory) -> None:
    """The server returns with a copy that it saved long ago."""
    async with joined(own_valkey.url, directory, "v", "w") as (v, w):
        old = await v.allocate("old", 1, 5)
        own_valkey.command("SAVE")
        await v.store.release("pool", "old", 1)
        new = await w.allocate("new", 2, 5)
        assert set(new) == set(old)
        restart(own_valkey)
        assert own_valkey.command("EXISTS", "{pool}:holder:old") == 1

        assert (await w.grow("new", 1, 5, 6)) == (5,)
        assert [h.holder_id for h in await v.store.holders("pool")] == ["new"]
        await assert_whole([v, w])


async def test_calls_wait_for_the_server_and_for_each_other(
    own_valkey: Valkey, directory: PoolDirectory
) -> None:
    """Unanswered calls are sent to the new ledger, in order."""
    async with joined(own_valkey.url, directory, "v", "w") as (v, w):
        await v.allocate("a", 1, 3)
        own_valkey.kill()
        grown = asyncio.create_task(v.grow("a", 1, 3, 4))
        epoch = asyncio.create_task(v.store.detach("pool", "a", 1))
        b = asyncio.create_task(v.allocate("b", 2, 2))
        heartbeat = asyncio.create_task(v.store.heartbeat("pool", "v"))
        c = asyncio.create_task(w.allocate("c", 3, 2))
        room = asyncio.create_task(w.store.wait_for_room("pool", 0.01))
        done, _ = await asyncio.wait([grown, epoch, b, heartbeat, c, room], timeout=0.2)
        assert done == set()
        own_valkey.start()
        await asyncio.gather(grown, epoch, b, heartbeat, c, room)
        assert epoch.result() == 2
        assert len({0, 1, 2, *grown.result(), *b.result(), *c.result()}) == 8
        await assert_whole([v, w])


async def test_a_worker_that_died_meanwhile_is_not_waited_for(
    own_valkey: Valkey, directory: PoolDirectory
) -> None:
    async with joined(own_valkey.url, directory, "v", "w") as (v, w):
        await w.allocate("b", 1, 3)
        own_valkey.kill()
        w.beating.cancel()
        await w.store.close()
        w.lock.close()
        own_valkey.start()
        await v.allocate("a", 2, 1)
        await assert_whole([v])


async def test_a_worker_that_is_stuck_keeps_what_it_may_write(
    own_valkey: Valkey, directory: PoolDirectory
) -> None:
    """Once it is fenced, the others go on; when it returns, it learns that it was fenced."""
    async with joined(own_valkey.url, directory, "v", "w") as (v, w):
        w.beating.cancel()
        stuck = await w.allocate("b", 1, 3)
        w.stamps.complete(stuck[0], A, ROOT, TOKENS[0])
        await w.store.commit("pool", "b", 1, [(stuck[0], A)])
        flush(own_valkey)
        waiting = asyncio.create_task(v.allocate("a", 2, NUM_BLOCKS - 2))
        manager = await RedisStore.connect(own_valkey.url)
        await until(lambda: missing(manager), lambda names: "w" in names)
        assert not waiting.done()
        await manager.fence("pool", "w")
        got = await waiting
        assert set(got) == set(range(NUM_BLOCKS)) - set(stuck[1:])
        with pytest.raises(OutOfBlocks):
            await v.store.allocate("pool", "c", "v", 3, [], 1)

        assert (await w.store.heartbeat("pool", "w")).fenced
        with pytest.raises(WorkerFenced):
            await w.grow("b", 1, 3, 4)
        assert await manager.reap("pool", "w") == 1
        await v.store.allocate("pool", "c", "v", 3, [], 2)
        assert (await manager.audit("pool")).violations == ()
        await manager.close()


async def test_a_worker_without_heartbeats_is_asked_to_report(
    own_valkey: Valkey, directory: PoolDirectory
) -> None:
    """An idle worker sends nothing, but listens: the others do not wait long for its report."""
    async with joined(own_valkey.url, directory, "v", "w") as (v, w):
        await v.allocate("a", 1, 3)
        w.beating.cancel()
        listening = asyncio.create_task(w.store.wait_for_room("pool", 10 * LIMIT_S))
        count = partial(own_valkey.command, "PUBSUB", "SHARDNUMSUB", "{pool}:room")
        await until(count, lambda found: found[1] == 1)
        flush(own_valkey)
        grown = asyncio.create_task(v.grow("a", 1, 3, 4))
        await listening
        assert not grown.done()
        await w.store.heartbeat("pool", "w")
        assert await grown == (3,)
        await assert_whole([v, w])


async def missing(store: RedisStore) -> tuple[str, ...]:
    try:
        return (await store.stats("pool")).missing_worker_ids
    except LedgerError:
        return ()


async def test_a_reader_follows_to_the_new_server(
    own_valkey: Valkey, directory: PoolDirectory
) -> None:
    """As gateways do, which have no holders to report."""
    async with joined(own_valkey.url, directory, "v") as (v,):
        reader = await RedisStore.connect(own_valkey.url)
        assert (await reader.stats("pool")).num_holders == 0
        restart(own_valkey)
        await v.allocate("a", 1, 1)
        assert (await reader.stats("pool")).num_holders == 1
        flush_all_there_is(own_valkey)
        await v.allocate("b", 2, 1)
        assert (await reader.stats("pool")).num_holders == 2
        await reader.close()


async def test_a_pool_whose_directory_is_gone_is_lost(
    own_valkey: Valkey, directory: PoolDirectory
) -> None:
    async with joined(own_valkey.url, directory, "v") as (v,):
        flush(own_valkey)
        directory.path.rename(directory.path.with_name(".gone"))
        for _ in range(2):
            with pytest.raises(Exception, match="gone"):
                await v.store.heartbeat("pool", "v")


@pytest.mark.timeout(30)
async def test_a_report_to_a_server_that_is_lost_meanwhile_is_given_up(own_valkey: Valkey) -> None:
    """A store is for one server. If that loses its functions too, it is another server, which ends
    the store, but not the event loop."""
    single_use = RedisStore._single_use(own_valkey.url, LIMIT_S)
    await single_use.drop_pool("pool")
    flush_all_there_is(own_valkey)
    asked = asyncio.create_task(single_use.drop_pool("pool"))
    await until(lambda: single_use._link("pool").server.in_doubt)
    async with asyncio.timeout(LIMIT_S):
        await asyncio.to_thread(restart, own_valkey)
        with pytest.raises(StoreLost, match="restarted"):
            await asked
        with pytest.raises(StoreLost):
            await single_use.drop_pool("pool")
        await single_use.close()


@pytest.mark.parametrize("seed", range(6))
async def test_recovery_ends_in_agreement_whatever_happens(
    own_valkey: Valkey, directory: PoolDirectory, seed: int
) -> None:
    """Three workers with random work and tickets between them, on a server that is lost again and
    again."""
    rng = random.Random(seed)
    async with joined(own_valkey.url, directory, "u", "v", "w") as workers:
        tickets: list[tuple[str, int]] = []
        ids = iter(f"h{number}" for number in range(10_000))
        stop = asyncio.Event()
        working = [asyncio.create_task(_work(w, rng, ids, tickets, stop)) for w in workers]
        for _ in range(4):
            await asyncio.sleep(rng.uniform(0.02, 0.2))
            await asyncio.to_thread(rng.choice([restart, flush, flush_all_there_is]), own_valkey)
        await asyncio.sleep(0.05)
        stop.set()
        await asyncio.gather(*working)
        for worker in workers:
            await worker.store.heartbeat("pool", worker.name)
        await assert_agreed(workers)


async def _work(
    worker: Worker,
    rng: random.Random,
    ids: Iterator[str],
    tickets: list[tuple[str, int]],
    stop: asyncio.Event,
) -> None:
    """Allocate, grow, detach, claim a ticket of any worker, release."""
    store, held = worker.store, dict[str, tuple[int, list[int]]]()
    while not stop.is_set():
        match rng.choice("aagdcr"):
            case "a":
                holder = next(ids)
                try:
                    blocks = await worker.allocate(holder, 1, rng.randint(1, 3))
                except OutOfBlocks:
                    await store.withdraw("pool", holder)
                else:
                    held[holder] = 1, list(blocks)
            case "g" if held:
                holder, (epoch, mine) = rng.choice(list(held.items()))
                growth = Growth(holder, epoch, len(mine), len(mine) + 1)
                (grown,) = (await store.extend("pool", worker.name, [growth])).grown
                assert grown.error in (None, "OUT_OF_BLOCKS")
                mine += grown.block_ids
            case "d" if held:
                holder = rng.choice(list(held))
                epoch, _ = held.pop(holder)
                tickets.append((holder, await store.detach("pool", holder, epoch)))
            case "c" if tickets:
                holder, epoch = tickets.pop(rng.randrange(len(tickets)))
                claimed = await store.claim("pool", holder, epoch, worker.name)
                (info,) = [h for h in await store.holders("pool") if h.holder_id == holder]
                await store.release("pool", holder, info.epoch)
                assert info.epoch == claimed.epoch
            case "r" if held:
                holder = rng.choice(list(held))
                epoch, _ = held.pop(holder)
                await store.release("pool", holder, epoch)
    for holder, (epoch, _) in held.items():
        await store.release("pool", holder, epoch)


async def assert_agreed(workers: list[Worker]) -> None:
    """All that is left are unclaimed tickets, and claimed ones whose issuers do not know it yet."""
    store = await RedisStore.connect(workers[0].url)
    for holder in await store.holders("pool"):
        assert holder.epoch == 2
        await store.release("pool", holder.holder_id, 2)
    report = await store.audit("pool")
    await store.close()
    assert report.violations == ()
    assert (report.num_held, report.num_free + report.num_cached) == (0, NUM_BLOCKS)
