"""Pools, workers and directories without an owner are removed."""

import asyncio

from services.pool.directory import pool_directories
from tests.waiting import until

from .conftest import PoolHost, assert_laws_hold, equals, gone, managed


async def test_a_pool_without_workers_goes_after_a_grace(host: PoolHost) -> None:
    empty, used = await host.make_pool("tiny-1"), await host.make_pool("tiny-2")
    await host.start_worker(used)

    async def removed() -> bool:
        return pool_directories(host.root) == (used,)

    async with managed(host, pool_grace_s=0.1):
        await until(removed)
    assert not empty.path.exists()
    assert await host.store.pool_ids() == ("tiny-2",)


async def test_half_a_pool_whose_maker_died_is_removed(host: PoolHost) -> None:
    half = host.root / ".half-tiny-1"
    (half / "workers").mkdir(parents=True)
    async with managed(host):
        await until(lambda: equals(half.exists(), False))


async def test_a_pool_of_the_store_without_directory_or_members_is_dropped(host: PoolHost) -> None:
    """A pool of another host has no directory here, but members."""
    for name in ("tiny-1", "tiny-2"):
        pool = await host.make_pool(name)
        await asyncio.to_thread(pool.remove)
    await host.announce("tiny-2", "decode-7", ttl_s=600)

    async def dropped() -> bool:
        return await host.store.pool_ids() == ("tiny-2",)

    async with managed(host, pool_grace_s=0.1):
        await until(dropped)


async def test_a_worker_of_the_store_without_a_lock_file_is_reaped(host: PoolHost) -> None:
    pool = await host.make_pool()
    await host.store.register_worker(pool.read_header().spec, "decode-9")
    await host.store.allocate(pool.pool_id, "h", "decode-9", 1, [], 2)
    async with managed(host):
        await until(gone(host, pool, "decode-9"))
    await assert_laws_hold(host, pool, free=11, cached=0, held=0)
