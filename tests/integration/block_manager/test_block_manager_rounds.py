"""The intervals of the block manager's rounds, and the calls of the store in a round."""

import asyncio
from dataclasses import replace

import pytest

from services.block_manager.auditor import LastAudits
from services.block_manager.config import BlockManagerSettings, Timing
from services.block_manager.manager import IDLE_SCANS, BlockManager
from services.block_manager.rounds import RoundRunner
from services.runtime.metrics import PoolMetrics

from .conftest import PoolHost

SCAN_S = 0.25


async def one_round(manager: BlockManager, host: PoolHost) -> float:
    """Make one round; returns the pause after it."""
    async with asyncio.TaskGroup() as tasks:
        await manager._run_checks(tasks, host.connection)
    return manager._pause_s()


@pytest.fixture
def manager(host: PoolHost) -> BlockManager:
    settings = BlockManagerSettings(pool_root=host.root)  # type: ignore[call-arg]
    return BlockManager(
        settings,
        RoundRunner(host.connection, host.connect),
        PoolMetrics(host.metrics),
        LastAudits(),
        timing=Timing(SCAN_S),
    )


async def test_a_round_reads_each_pool_once(host: PoolHost, manager: BlockManager) -> None:
    for pool_id in ("tiny-1", "tiny-2"):
        await host.start_worker(await host.make_pool(pool_id))
        await host.announce(pool_id, "decode-1", ttl_s=60)
    host.store.num_reads.clear()
    await one_round(manager, host)
    assert host.store.num_reads == {"tiny-1": 1, "tiny-2": 1}


async def test_rounds_are_rare_while_nobody_needs_them(
    host: PoolHost, manager: BlockManager
) -> None:
    assert manager._pause_s() == SCAN_S  # nothing is known yet
    pool = await host.make_pool()
    await host.start_worker(pool)
    await host.announce(pool.pool_id, "decode-1", ttl_s=60)
    assert await one_round(manager, host) == IDLE_SCANS * SCAN_S

    await host.store.allocate(pool.pool_id, "h", "decode-1", 1, [], 1)
    assert await one_round(manager, host) == SCAN_S
    await host.store.release(pool.pool_id, "h", 1)
    assert await one_round(manager, host) == IDLE_SCANS * SCAN_S


async def test_starting_and_silent_workers_are_watched_closely(
    host: PoolHost, manager: BlockManager
) -> None:
    pool = await host.make_pool()
    await host.start_worker(pool)
    await host.announce(pool.pool_id, "decode-1", ttl_s=60)
    assert await one_round(manager, host) == IDLE_SCANS * SCAN_S

    (member,) = await host.connection.registry.members()
    starting = replace(member, member_id="decode-2", state="starting")
    await host.connection.registry.announce(starting, ttl_s=60)
    assert await one_round(manager, host) == SCAN_S
    await host.connection.registry.withdraw("decode-2")
    assert await one_round(manager, host) == IDLE_SCANS * SCAN_S

    await host.connection.registry.withdraw("decode-1")  # it lives, and does not say so
    assert await one_round(manager, host) == SCAN_S
