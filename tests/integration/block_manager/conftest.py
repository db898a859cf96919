"""Pools on one host, worker processes that die, and a block manager."""

import asyncio
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from blockstore.memory_store import MemoryStore
from blockstore.records import AuditReport, PoolStats
from blockstore.registry import Member
from services.block_manager.auditor import LastAudits
from services.block_manager.config import BlockManagerSettings, Timing
from services.block_manager.gpu.processes import GpuProcesses
from services.block_manager.manager import BlockManager
from services.block_manager.rounds import Connection, RoundRunner
from services.pool.arena import make_file
from services.pool.directory import PoolDirectory, new_directory
from services.pool.header import PoolHeader
from services.pool.layout import PoolLayout
from services.pool.stamps import record_bytes
from services.runtime.metrics import PoolMetrics
from tests.memory_registry import MemoryRegistry

LIMIT_S = 60.0
NUM_BLOCKS = 11
LAYOUT = PoolLayout("tiny", "f00d", 1, 1, 1, "float32", 4)
ROOT, H0, H1, H2 = (bytes([value]) * 16 for value in range(4))
TOKENS = (1, 2, 3, 4)
HOLD = """
import sys
from pathlib import Path
from services.pool.locks import WorkerLock

lock = WorkerLock.create(Path(sys.argv[1]))
print("locked", flush=True)
sys.stdin.read()
"""


class Store(MemoryStore):
    """`error`: while it is set, every reap and every listing of pools raises it. `num_reads`: the
    reads of each pool's counters."""

    error: Exception | None = None
    violations: tuple[str, ...] = ()

    def __init__(self) -> None:
        super().__init__()
        self.num_reads = Counter[str]()

    async def stats(self, pool_id: str) -> PoolStats:
        self.num_reads[pool_id] += 1
        return await super().stats(pool_id)

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


class PoolHost:
    """Pools under one root, worker processes, and the current store and registry."""

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
        """A process that holds the worker's lock and sleeps."""
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
def host(tmp_path: Path) -> Iterator[PoolHost]:
    host = PoolHost(tmp_path)
    yield host
    host.end()


@asynccontextmanager
async def managed(
    host: PoolHost, listed: GpuProcesses | None = None, **settings: float
) -> AsyncIterator[None]:
    """The block manager runs during the block; nothing is overdue unless `settings` say so."""
    timing = Timing(0.02, settings.pop("audit_interval_s", 600))
    usual = {"fence_after_s": 600, "pool_grace_s": 600}
    manager = BlockManager(
        BlockManagerSettings(pool_root=host.root, **{**usual, **settings}),  # type: ignore[arg-type]
        RoundRunner(host.connection, host.connect),
        PoolMetrics(host.metrics),
        LastAudits(),
        listed,
        timing,
    )
    running = asyncio.create_task(manager.run())
    try:
        async with asyncio.timeout(LIMIT_S):
            yield
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


def gone(
    host: PoolHost, pool: PoolDirectory, worker_id: str = "decode-1"
) -> Callable[..., Awaitable[bool]]:
    """Whether the worker is neither in the store nor has a lock file."""

    async def condition() -> bool:
        workers = (await host.store.stats(pool.pool_id)).worker_ids
        return worker_id not in workers and worker_id not in pool.worker_ids()

    return condition


async def assert_laws_hold(
    host: PoolHost, pool: PoolDirectory, *, free: int, cached: int, held: int
) -> None:
    report = await host.store.audit(pool.pool_id)
    assert report.violations == ()
    assert (report.num_free, report.num_cached, report.num_held) == (free, cached, held)


async def observed(host: PoolHost, pool: PoolDirectory) -> bool:
    """Wait until the manager has made a round, so that it watches every lock."""
    labels = {"pool_id": pool.pool_id, "model_name": "tiny"}
    return host.metrics.get_sample_value("quire:kv_cache_holders", labels) is not None


async def equals(value: object, expected: object) -> bool:
    return value == expected
