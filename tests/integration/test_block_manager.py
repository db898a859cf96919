"""The block manager and workers that really die, stop and leave."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from blockstore.errors import StoreLost, StoreUnavailable, UnknownPool
from blockstore.memory_registry import MemoryRegistry
from blockstore.memory_store import MemoryStore
from blockstore.registry import Member
from blockstore.store import AuditReport
from services.block_manager.config import BlockManagerSettings
from services.block_manager.link import Connection, Link
from services.block_manager.manager import BlockManager
from services.block_manager.reaper import reap
from services.block_manager.watcher import Watcher
from services.common.metrics import PoolMetrics
from services.common.pool.arena import make_file
from services.common.pool.directory import PoolDirectory, new_directory, pool_directories
from services.common.pool.header import PoolHeader
from services.common.pool.layout import PoolLayout
from services.common.pool.locks import WorkerLock, host_lock
from services.common.pool.stamps import Stamps, record_bytes

LIMIT_S = 10.0
NUM_BLOCKS = 11
LAYOUT = PoolLayout("tiny", "f00d", 1, 1, 1, "float32", 4)
ROOT, H0, H1, H2 = (bytes([value]) * 16 for value in range(4))
TOKENS = (1, 2, 3, 4)
HOLD = """
import sys
from pathlib import Path
from services.common.pool.locks import WorkerLock

lock = WorkerLock.create(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


class Store(MemoryStore):
    """`error`: what every reap and every listing of pools raises until it is taken away."""

    error: Exception | None = None
    violations: tuple[str, ...] = ()

    def _fail(self) -> None:
        if self.error:
            raise self.error

    async def pool_ids(self) -> tuple[str, ...]:
        self._fail()
        return await super().pool_ids()

    async def reap(self, pool_id: str, worker_id: str) -> int:
        self._fail()
        return await super().reap(pool_id, worker_id)

    async def audit(self, pool_id: str) -> AuditReport:
        report = await super().audit(pool_id)
        return replace(report, violations=self.violations + report.violations)


class Host:
    """Pools under one root, workers as processes, and the store and registry of the moment."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.connection = Connection(Store(), MemoryRegistry())
        self.metrics = CollectorRegistry()
        self._processes: list[subprocess.Popen[str]] = []

    @property
    def store(self) -> Store:
        assert isinstance(self.connection.store, Store)
        return self.connection.store

    async def connect(self) -> Connection:
        return self.connection

    async def make_pool(self, pool_id: str = "tiny-1") -> PoolDirectory:
        header = PoolHeader(pool_id, "run", LAYOUT, NUM_BLOCKS, watermark_blocks=0)
        with new_directory(self.root, pool_id) as directory:
            make_file(directory.kv, header.arena_bytes)
            make_file(directory.stamps, NUM_BLOCKS * record_bytes(LAYOUT.block_size))
            header.write(directory.header)
        await self.store.register_pool(header.spec)
        return PoolDirectory(self.root / pool_id)

    async def start_worker(
        self, pool: PoolDirectory, worker_id: str = "decode-1"
    ) -> subprocess.Popen[str]:
        """A process that holds the worker's lock and sits there."""
        process = await asyncio.to_thread(self._start, pool.lock_path(worker_id))
        await self.store.register_worker(pool.read_header().spec, worker_id)
        return process

    async def announce(self, pool_id: str, worker_id: str, ttl_s: float) -> None:
        member = Member(worker_id, "decode", "", "serving", 0, 1, pool_id=pool_id)
        await self.connection.registry.announce(member, ttl_s)

    def count(self, name: str, **labels: str) -> float:
        return self.metrics.get_sample_value(f"quire:{name}_total", labels) or 0.0

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()

    def _start(self, lock_path: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(lock_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        return process


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    host = Host(tmp_path)
    yield host
    host.end()


@asynccontextmanager
async def managed(host: Host, **settings: float) -> AsyncIterator[None]:
    """The block manager runs meanwhile; nothing overdue unless `settings` say so."""
    usual = {"scan_interval_s": 0.02, "fence_after_s": 600, "pool_grace_s": 600}
    manager = BlockManager(
        BlockManagerSettings(pool_root=host.root, **{**usual, **settings}),  # type: ignore[arg-type]
        Link(host.connection, host.connect),
        PoolMetrics(host.metrics),
    )
    running = asyncio.create_task(manager.run())
    try:
        async with asyncio.timeout(LIMIT_S):
            yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Bounded by `managed`."""
    while True:
        if await condition():
            return
        await asyncio.sleep(0.005)


def gone(
    host: Host, pool: PoolDirectory, worker_id: str = "decode-1"
) -> Callable[..., Awaitable[bool]]:
    """Neither in the store nor by a lock file."""

    async def condition() -> bool:
        workers = (await host.store.stats(pool.pool_id)).worker_ids
        return worker_id not in workers and worker_id not in pool.worker_ids()

    return condition


async def assert_lawful(
    host: Host, pool: PoolDirectory, *, free: int, cached: int, held: int
) -> None:
    report = await host.store.audit(pool.pool_id)
    assert report.violations == ()
    assert (report.num_free, report.num_cached, report.num_held) == (free, cached, held)


async def test_a_killed_workers_blocks_are_back_at_once(host: Host) -> None:
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
    await assert_lawful(host, pool, free=9, cached=0, held=2)
    assert [holder.holder_id for holder in await host.store.holders(pool.pool_id)] == ["h2"]
    assert host.count("workers_reaped") == 1
    assert other.poll() is None


async def observed(host: Host, pool: PoolDirectory) -> bool:
    """The manager has been round at least once, so that it waits for every lock."""
    labels = {"pool_id": pool.pool_id, "model_name": "tiny"}
    return host.metrics.get_sample_value("quire:kv_cache_holders", labels) is not None


async def test_a_lock_file_keeps_its_name_until_its_worker_is_reaped(host: Host) -> None:
    """Who buries dies too: whatever is not done yet is found by the next one."""
    pool = await host.make_pool()
    worker = await host.start_worker(pool)
    await host.store.allocate(pool.pool_id, "h", "decode-1", 1, [], 3)
    names = []

    async def bury(directory: PoolDirectory, worker_id: str) -> None:
        names.append(directory.worker_ids())
        assert await reap(host.connection, directory, worker_id)
        await assert_lawful(host, pool, free=11, cached=0, held=0)
        names.append(directory.worker_ids())

    watching = asyncio.create_task(Watcher(host.root, bury).run(scan_interval_s=0.02))
    worker.kill()
    async with asyncio.timeout(LIMIT_S):
        await until(gone(host, pool))
    watching.cancel()
    assert names == [("decode-1",), ("decode-1",)]


async def test_what_a_dead_worker_had_finished_is_published(host: Host) -> None:
    """Block 1 is committed, 2 finished and not yet committed, 3 private, 4 finished by another."""
    pool = await host.make_pool()
    worker = await host.start_worker(pool)
    given = await host.store.allocate(pool.pool_id, "h", "decode-1", 1, [], 4)
    first, second, third, fourth = given.block_ids
    stamps = Stamps(pool.stamps, NUM_BLOCKS, LAYOUT.block_size)
    stamps.own([first, second, third], "h")
    stamps.complete(first, H0, ROOT, TOKENS)
    await host.store.commit(pool.pool_id, "h", 1, [(first, H0)])
    stamps.complete(second, H1, H0, TOKENS)
    stamps.own([fourth], "who had it before")
    stamps.complete(fourth, H2, H1, TOKENS)
    stamps.close()
    async with managed(host):
        worker.kill()
        await until(gone(host, pool))
    assert await host.store.match(pool.pool_id, [H0, H1, H2]) == 2
    await assert_lawful(host, pool, free=9, cached=2, held=0)
    again = await host.start_worker(pool, "decode-2")
    assert again.poll() is None
    adopted = await host.store.allocate(pool.pool_id, "h2", "decode-2", 2, [H0, H1], 3)
    assert adopted.block_ids[:2] == (first, second)


async def test_a_finished_block_that_was_given_back_is_not_published(host: Host) -> None:
    pool = await host.make_pool()
    worker = await host.start_worker(pool)
    given = await host.store.allocate(pool.pool_id, "h", "decode-1", 1, [], 2)
    stamps = Stamps(pool.stamps, NUM_BLOCKS, LAYOUT.block_size)
    stamps.own(given.block_ids, "h")
    for block_id, prefix_hash in zip(given.block_ids, [H0, H1], strict=True):
        stamps.complete(block_id, prefix_hash, ROOT, TOKENS)
    stamps.close()
    await host.store.give_back(pool.pool_id, "h", 1, given.block_ids[:1])
    async with managed(host):
        worker.kill()
        await until(gone(host, pool))
    assert await host.store.match(pool.pool_id, [H0]) == 0
    assert await host.store.match(pool.pool_id, [H1]) == 1
    await assert_lawful(host, pool, free=10, cached=1, held=0)


async def test_unreadable_stamps_do_not_keep_a_worker_from_being_reaped(host: Host) -> None:
    pool = await host.make_pool()
    worker = await host.start_worker(pool)
    await host.store.allocate(pool.pool_id, "h", "decode-1", 1, [], 2)
    pool.stamps.write_bytes(b"short")
    async with managed(host):
        worker.kill()
        await until(gone(host, pool))
    await assert_lawful(host, pool, free=11, cached=0, held=0)


async def test_a_ticket_that_was_claimed_outlives_its_issuer(host: Host) -> None:
    pool = await host.make_pool()
    worker = await host.start_worker(pool, "prefill-1")
    await host.start_worker(pool, "decode-1")
    await host.store.allocate(pool.pool_id, "h", "prefill-1", 1, [], 2)
    await host.store.detach(pool.pool_id, "h", 1)
    await host.store.claim(pool.pool_id, "h", 2, "decode-1")
    async with managed(host):
        worker.kill()
        await until(gone(host, pool, "prefill-1"))
    await assert_lawful(host, pool, free=9, cached=0, held=2)


async def test_a_stopped_worker_is_fenced_and_its_blocks_are_quarantined_until_it_dies(
    host: Host,
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
        await assert_lawful(host, pool, free=8, cached=0, held=3)
        assert host.count("workers_fenced") == 1
        worker.kill()
        await until(gone(host, pool))
        await assert_lawful(host, pool, free=11, cached=0, held=0)


async def test_who_is_stuck_is_fenced_on_every_pool_it_is_on(host: Host) -> None:
    """A pool and its colder one: they share nothing but the workers."""
    pools = [await host.make_pool(pool_id) for pool_id in ("tiny-1", "tiny-swap-1")]
    for pool in pools:
        await host.start_worker(pool, "decode-1")
        await host.store.allocate(pool.pool_id, "h", "decode-1", 1, [], 3)

    async def fenced() -> bool:
        stats = [await host.store.stats(pool.pool_id) for pool in pools]
        return all(one.fenced_worker_ids == ("decode-1",) for one in stats)

    async with managed(host, fence_after_s=0.2):
        await until(fenced)


async def test_workers_that_report_or_are_still_starting_are_not_fenced(host: Host) -> None:
    """decode-3 is silent and holds something: when it is fenced, the others had their chance."""
    pool = await host.make_pool()
    for worker_id in ("decode-1", "decode-2", "decode-3"):
        await host.start_worker(pool, worker_id)
    await host.announce(pool.pool_id, "decode-1", ttl_s=600)
    await host.store.allocate(pool.pool_id, "h", "decode-3", 1, [], 1)
    async with managed(host, fence_after_s=0.2):
        await until(lambda: equals(host.count("workers_fenced"), 1))
        assert (await host.store.stats(pool.pool_id)).fenced_worker_ids == ("decode-3",)


async def equals(value: object, expected: object) -> bool:
    return value == expected


async def test_a_pool_without_workers_goes_after_a_grace(host: Host) -> None:
    empty, used = await host.make_pool("tiny-1"), await host.make_pool("tiny-2")
    await host.start_worker(used)

    async def removed() -> bool:
        return pool_directories(host.root) == (used,)

    async with managed(host, pool_grace_s=0.1):
        await until(removed)
    assert not empty.path.exists()
    assert await host.store.pool_ids() == ("tiny-2",)


async def test_half_a_pool_whose_maker_died_is_removed(host: Host) -> None:
    half = host.root / ".half-tiny-1"
    (half / "workers").mkdir(parents=True)
    async with managed(host):
        await until(lambda: equals(half.exists(), False))


async def test_the_pool_of_the_last_worker_that_died_is_removed(host: Host) -> None:
    pool = await host.make_pool()
    worker = await host.start_worker(pool)

    async def removed() -> bool:
        return not pool_directories(host.root) and not await host.store.pool_ids()

    async with managed(host, pool_grace_s=0.1):
        worker.kill()
        await until(removed)


async def test_a_pool_of_the_store_without_directory_or_members_is_dropped(host: Host) -> None:
    """Another host's pool has no directory here, but members."""
    for name in ("tiny-1", "tiny-2"):
        pool = await host.make_pool(name)
        await asyncio.to_thread(pool.remove)
    await host.announce("tiny-2", "decode-7", ttl_s=600)

    async def dropped() -> bool:
        return await host.store.pool_ids() == ("tiny-2",)

    async with managed(host, pool_grace_s=0.1):
        await until(dropped)


async def test_a_worker_of_the_store_without_a_lock_file_is_reaped(host: Host) -> None:
    pool = await host.make_pool()
    await host.store.register_worker(pool.read_header().spec, "decode-9")
    await host.store.allocate(pool.pool_id, "h", "decode-9", 1, [], 2)
    async with managed(host):
        await until(gone(host, pool, "decode-9"))
    await assert_lawful(host, pool, free=11, cached=0, held=0)


async def test_a_worker_that_dies_while_the_store_is_away_is_reaped_when_it_is_back(
    host: Host,
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


async def test_after_the_store_was_lost_the_manager_serves_the_new_one(host: Host) -> None:
    """The old pool's directory stays while its worker lives, and goes after it."""
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


async def test_a_worker_that_leaves_is_not_reaped(host: Host) -> None:
    pool = await host.make_pool()
    await host.start_worker(pool, "decode-2")
    lock = WorkerLock.create(pool.lock_path("decode-1"))
    async with managed(host):
        await until(lambda: observed(host, pool))
        lock.unlink()
        lock.close()
        await until(gone(host, pool))
    assert host.count("workers_reaped") == 0


async def test_a_broken_law_is_counted(host: Host) -> None:
    host.store.violations = ("block 3 has 2 references and 1 holder",)
    pool = await host.make_pool()
    labels = {"pool_id": pool.pool_id, "model_name": "tiny"}

    async def counted() -> bool:
        return host.count("audit_violations", **labels) >= 1

    async with managed(host, audit_interval_s=0.02):
        await until(counted)
