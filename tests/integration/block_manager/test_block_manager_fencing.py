"""Stuck workers are fenced, and workers that only seem stuck are not."""

import signal

from tests.waiting import until

from .conftest import PoolHost, assert_laws_hold, equals, gone, managed


async def test_a_stopped_worker_is_fenced_and_its_blocks_are_quarantined_until_it_dies(
    host: PoolHost,
) -> None:
    pool = await host.make_pool()
    worker = await host.start_worker(pool)
    await host.store.allocate(pool.pool_id, "h", "decode-1", 1, [], 3)
    await host.announce(pool.pool_id, "decode-1", ttl_s=0.1)

    async def fenced() -> bool:
        return (await host.store.stats(pool.pool_id)).fenced_worker_ids == ("decode-1",)

    async with managed(host, fence_after_s=0.2):
        worker.send_signal(signal.SIGSTOP)
        await until(fenced)
        assert (await host.store.stats(pool.pool_id)).worker_ids == ("decode-1",)
        await assert_laws_hold(host, pool, free=8, cached=0, held=3)
        assert host.count("workers_fenced") == 1
        worker.kill()
        await until(gone(host, pool))
        await assert_laws_hold(host, pool, free=11, cached=0, held=0)


async def test_a_stuck_worker_is_fenced_on_all_its_pools(host: PoolHost) -> None:
    """A pool and its swap pool share only the workers."""
    pools = [await host.make_pool(pool_id) for pool_id in ("tiny-1", "tiny-swap-1")]
    for pool in pools:
        await host.start_worker(pool, "decode-1")
        await host.store.allocate(pool.pool_id, "h", "decode-1", 1, [], 3)

    async def fenced() -> bool:
        stats = [await host.store.stats(pool.pool_id) for pool in pools]
        return all(one.fenced_worker_ids == ("decode-1",) for one in stats)

    async with managed(host, fence_after_s=0.2):
        await until(fenced)


async def test_workers_that_report_or_are_still_starting_are_not_fenced(host: PoolHost) -> None:
    """decode-3 is silent and holds blocks: once it is fenced, the manager has judged the others
    too."""
    pool = await host.make_pool()
    for worker_id in ("decode-1", "decode-2", "decode-3"):
        await host.start_worker(pool, worker_id)
    await host.announce(pool.pool_id, "decode-1", ttl_s=600)
    await host.store.allocate(pool.pool_id, "h", "decode-3", 1, [], 1)
    async with managed(host, fence_after_s=0.2):
        await until(lambda: equals(host.count("workers_fenced"), 1))
        assert (await host.store.stats(pool.pool_id)).fenced_worker_ids == ("decode-3",)
