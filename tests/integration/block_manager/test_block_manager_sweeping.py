"""Pools, workers and directories without an owner are removed."""

import asyncio

import pytest

from blockstore.errors import StoreLost, UnknownPool
from blockstore.memory_registry import MemoryRegistry
from services.block_manager.rounds import Connection
from services.pool.directory import pool_directories
from services.pool.locks import host_lock
from tests.waiting import until

from .conftest import PoolHost, Store, assert_laws_hold, equals, gone, managed, observed


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


async def test_the_pool_of_the_last_worker_that_died_is_removed(host: PoolHost) -> None:
    pool = await host.make_pool()
    worker = await host.start_worker(pool)

    async def removed() -> bool:
        return not pool_directories(host.root) and not await host.store.pool_ids()

    async with managed(host, pool_grace_s=0.1):
        worker.kill()
        await until(removed)


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


async def test_after_the_store_was_lost_the_manager_serves_the_new_one(host: PoolHost) -> None:
    """The old pool's directory stays while its worker lives, and is removed afterwards."""
    old = await host.make_pool("tiny-1")
    old_worker = await host.start_worker(old)
    async with managed(host, pool_grace_s=0.1):
        await until(lambda: observed(host, old))
        lost = host.store
        host.connection = Connection(Store(), MemoryRegistry())
        lost.error = StoreLost("empty")
        async with host_lock(host.root):  # As who joins does: an empty pool is not swept meanwhile.
            new = await host.make_pool("tiny-2")
            new_worker = await host.start_worker(new, "decode-2")
        await host.start_worker(new, "decode-3")
        new_worker.kill()
        await until(gone(host, new, "decode-2"))
        assert pool_directories(host.root) == (old, new)
        old_worker.kill()
        await until(lambda: equals(pool_directories(host.root), (new,)))
        with pytest.raises(UnknownPool):
            await host.store.stats(old.pool_id)


async def test_a_member_on_another_host_is_reaped_when_its_lease_has_ended(host: PoolHost) -> None:
    """The member has no lock file here. A renewed lease protects its blocks."""
    pool = await host.make_pool()
    await host.start_worker(pool)
    spec = pool.read_header().spec
    for name, lease_ms in (("remote-1", 600_000), ("remote-2", 200)):
        await host.store.register_worker(spec, name, lease_ms=lease_ms)
        await host.store.allocate("tiny-1", f"of {name}", name, 1, [], 1)

    async def only_one_holds() -> bool:
        holders = await host.store.holders("tiny-1")
        return [holder.worker_id for holder in holders] == ["remote-1"]

    async with managed(host):
        assert not await only_one_holds()
        await until(only_one_holds)
