"""Workers that die or leave, also while the store is away."""

import asyncio

from blockstore.errors import StoreUnavailable
from services.block_manager.gpu.processes import AllProcesses
from services.block_manager.liveness import Liveness, WorkerProcesses
from services.block_manager.reaper import reap
from services.block_manager.watcher import Watcher
from services.pool.directory import PoolDirectory
from services.pool.locks import WorkerLock
from services.pool.stamps import Stamps
from tests.waiting import until

from .conftest import (
    H0,
    H1,
    H2,
    LAYOUT,
    LIMIT_S,
    NUM_BLOCKS,
    ROOT,
    TOKENS,
    PoolHost,
    assert_laws_hold,
    gone,
    managed,
    observed,
)


async def test_a_killed_workers_blocks_are_back_at_once(host: PoolHost) -> None:
    pool = await host.make_pool()
    worker = await host.start_worker(pool)
    other = await host.start_worker(pool, "decode-2")
    await host.store.allocate(pool.pool_id, "h1", "decode-1", 1, [], 3)
    await host.store.allocate(pool.pool_id, "h2", "decode-2", 2, [], 2)
    async with managed(host):
        await until(lambda: observed(host, pool))
        killed_at = asyncio.get_running_loop().time()
        worker.kill()
        await until(gone(host, pool))
        # Tens of milliseconds, on a machine that has time for us.
        assert asyncio.get_running_loop().time() - killed_at < 1.0
    await assert_laws_hold(host, pool, free=9, cached=0, held=2)
    assert [holder.holder_id for holder in await host.store.holders(pool.pool_id)] == ["h2"]
    assert host.count("workers_reaped") == 1
    assert other.poll() is None


async def test_a_lock_file_keeps_its_name_until_its_worker_is_reaped(host: PoolHost) -> None:
    """The block manager may die too: its successor finds the rest of the work."""
    pool = await host.make_pool()
    worker = await host.start_worker(pool)
    await host.store.allocate(pool.pool_id, "h", "decode-1", 1, [], 3)
    names = []

    async def reap_and_note(directory: PoolDirectory, worker_id: str) -> None:
        names.append(directory.worker_ids())
        assert await reap(host.connection, directory, worker_id)
        await assert_laws_hold(host, pool, free=11, cached=0, held=0)
        names.append(directory.worker_ids())

    liveness = Liveness(WorkerProcesses(), AllProcesses())
    watcher = Watcher(host.root, reap_and_note, liveness, lambda quiet_s: None)
    watching = asyncio.create_task(watcher.run(lambda: 0.02))
    worker.kill()
    async with asyncio.timeout(LIMIT_S):
        await until(gone(host, pool))
    watching.cancel()
    assert names == [("decode-1",), ("decode-1",)]


async def test_finished_blocks_of_a_dead_worker_are_published(host: PoolHost) -> None:
    """Block 1 is committed, 2 finished but not committed, 3 private, 4 finished by another
    worker."""
    pool = await host.make_pool()
    worker = await host.start_worker(pool)
    given = await host.store.allocate(pool.pool_id, "h", "decode-1", 1, [], 4)
    first, second, third, fourth = given.block_ids
    stamps = Stamps(pool.stamps, NUM_BLOCKS, LAYOUT.block_size)
    stamps.mark_owned([first, second, third], "h")
    stamps.complete(first, H0, ROOT, TOKENS)
    await host.store.commit(pool.pool_id, "h", 1, [(first, H0)])
    stamps.complete(second, H1, H0, TOKENS)
    stamps.mark_owned([fourth], "who had it before")
    stamps.complete(fourth, H2, H1, TOKENS)
    stamps.close()
    async with managed(host):
        worker.kill()
        await until(gone(host, pool))
    assert await host.store.match(pool.pool_id, [H0, H1, H2]) == 2
    await assert_laws_hold(host, pool, free=9, cached=2, held=0)
    again = await host.start_worker(pool, "decode-2")
    assert again.poll() is None
    adopted = await host.store.allocate(pool.pool_id, "h2", "decode-2", 2, [H0, H1], 3)
    assert adopted.block_ids[:2] == (first, second)


async def test_a_finished_block_that_was_given_back_is_not_published(host: PoolHost) -> None:
    pool = await host.make_pool()
    worker = await host.start_worker(pool)
    given = await host.store.allocate(pool.pool_id, "h", "decode-1", 1, [], 2)
    stamps = Stamps(pool.stamps, NUM_BLOCKS, LAYOUT.block_size)
    stamps.mark_owned(given.block_ids, "h")
    for block_id, prefix_hash in zip(given.block_ids, [H0, H1], strict=True):
        stamps.complete(block_id, prefix_hash, ROOT, TOKENS)
    stamps.close()
    await host.store.give_back(pool.pool_id, "h", 1, given.block_ids[:1])
    async with managed(host):
        worker.kill()
        await until(gone(host, pool))
    assert await host.store.match(pool.pool_id, [H0]) == 0
    assert await host.store.match(pool.pool_id, [H1]) == 1
    await assert_laws_hold(host, pool, free=10, cached=1, held=0)


async def test_unreadable_stamps_do_not_keep_a_worker_from_being_reaped(host: PoolHost) -> None:
    pool = await host.make_pool()
    worker = await host.start_worker(pool)
    await host.store.allocate(pool.pool_id, "h", "decode-1", 1, [], 2)
    pool.stamps.write_bytes(b"short")
    async with managed(host):
        worker.kill()
        await until(gone(host, pool))
    await assert_laws_hold(host, pool, free=11, cached=0, held=0)


async def test_a_worker_that_dies_while_the_store_is_away_is_reaped_when_it_is_back(
    host: PoolHost,
) -> None:
    pool = await host.make_pool()
    worker = await host.start_worker(pool)
    await host.store.allocate(pool.pool_id, "h", "decode-1", 1, [], 2)
    async with managed(host):
        host.store.error = StoreUnavailable("away")
        worker.kill()
        _, pending = await asyncio.wait(
            [asyncio.ensure_future(until(gone(host, pool)))], timeout=0.2
        )
        assert pending
        host.store.error = None
        await asyncio.gather(*pending)


async def test_a_worker_that_leaves_is_not_reaped(host: PoolHost) -> None:
    pool = await host.make_pool()
    await host.start_worker(pool, "decode-2")
    lock = WorkerLock.create(pool.lock_path("decode-1"))
    async with managed(host):
        await until(lambda: observed(host, pool))
        lock.unlink()
        lock.close()
        await until(gone(host, pool))
    assert host.count("workers_reaped") == 0


async def test_a_broken_law_is_counted(host: PoolHost) -> None:
    host.store.violations = ("block 3 has 2 references and 1 holder",)
    pool = await host.make_pool()
    labels = {"pool_id": pool.pool_id, "model_name": "tiny"}

    async def counted() -> bool:
        return host.count("audit_violations", **labels) >= 1

    async with managed(host, audit_interval_s=0.02):
        await until(counted)
