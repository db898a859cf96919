"""A block manager and real worker processes on a GPU's memory, which is memory of the host here."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from services.block_manager.gpu.processes import AllProcesses
from services.pool.directory import PoolDirectory, new_directory
from services.pool.header import PoolHeader
from services.pool.stamps import record_bytes
from tests.waiting import until

from .conftest import LAYOUT, NUM_BLOCKS, PoolHost, assert_laws_hold, equals, gone, managed

SIZE = 2 << 20
WORKER = """
import mmap, os, sys
from pathlib import Path
from services.pool.directory import PoolDirectory
from services.pool.keeper import Registration, register
from services.pool.locks import WorkerLock

root, pool_id, worker_id, creates = sys.argv[1:]
made = os.memfd_create("quire-MEMFD-0") if creates == "yes" else None
if made is not None:
    os.ftruncate(made, 2 << 20)
if creates != "unlisted":
    page = os.memfd_create("quire-MEMFD-0")
    os.ftruncate(page, 4096)
    context = mmap.mmap(page, 4096)
    os.close(page)
brought = [] if made is None else [made]
registration = Registration(pool_id, worker_id, ("MEMFD-0",))
kept = register(Path(root), registration, brought, is_live=True)
memory = mmap.mmap(kept.fd, 2 << 20)
lock = WorkerLock.create(PoolDirectory(Path(root) / pool_id).lock_path(worker_id))
print(memory[0], flush=True)
memory[0] += 1
print(memory[0], flush=True)
sys.stdin.read()
"""
"""The part of a worker that the tests need, without PyTorch, whose import takes seconds."""


class BusyGpu(AllProcesses):
    """A GPU whose driver tears a killed process down when the test says so."""

    def __init__(self) -> None:
        self.busy: set[int] = set()

    def pids(self, gpu_uuid: str) -> frozenset[int]:
        return super().pids(gpu_uuid) | self.busy


class GpuWorkers:
    def __init__(self, host: PoolHost) -> None:
        self._host = host
        self._processes: list[subprocess.Popen[str]] = []

    async def start(
        self, pool: PoolDirectory, worker_id: str, creates: bool = False
    ) -> tuple["subprocess.Popen[str]", str]:
        """Start a worker and register it; returns it with the content that it found in the
        memory."""
        how = "yes" if creates else "no"
        arguments = self._host.root, pool.pool_id, worker_id, how
        process, found = await asyncio.to_thread(self._start, *map(str, arguments))
        await self._host.store.register_worker(pool.read_header().spec, worker_id)
        return process, found

    def _start(self, *arguments: str) -> tuple["subprocess.Popen[str]", str]:
        process = subprocess.Popen(
            [sys.executable, "-c", WORKER, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._processes.append(process)
        assert process.stdout is not None
        found = process.stdout.readline().strip()
        process.stdout.readline()  # it has written
        return process, found

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.communicate()


@pytest.fixture
def workers(host: PoolHost) -> Iterator[GpuWorkers]:
    workers = GpuWorkers(host)
    yield workers
    workers.end()


async def make_pool(host: PoolHost) -> PoolDirectory:
    header = PoolHeader(
        "tiny-1",
        "run",
        LAYOUT,
        NUM_BLOCKS,
        0,
        kind="cuda",
        gpu_uuids=("MEMFD-0",),
        memory_bytes=SIZE,
    )
    with new_directory(host.root, "tiny-1") as directory:
        directory.stamps.write_bytes(bytes(NUM_BLOCKS * record_bytes(LAYOUT.block_size)))
        header.write(directory.header)
    await host.store.register_pool(header.spec)
    return PoolDirectory(host.root / "tiny-1")


async def test_a_killed_worker_is_reaped_when_the_gpu_is_done_with_it(
    host: PoolHost, workers: GpuWorkers
) -> None:
    pool, gpu = await make_pool(host), BusyGpu()
    async with managed(host, listed=gpu):
        worker, _ = await workers.start(pool, "decode-1", creates=True)
        await host.store.allocate(pool.pool_id, "h", "decode-1", 1, [], 3)
        gpu.busy.add(worker.pid)
        worker.kill()
        worker.wait()
        await until(lambda: lock_is_taken(pool, "decode-1"))
        for _ in range(5):
            await asyncio.sleep(0.02)  # rounds of the manager
            assert (await host.store.stats(pool.pool_id)).num_held == 3
        gpu.busy.clear()
        await until(gone(host, pool))
    await assert_laws_hold(host, pool, free=11, cached=0, held=0)
    assert host.metrics.get_sample_value("quire:worker_quiet_seconds_count") == 1
    assert (host.metrics.get_sample_value("quire:worker_quiet_seconds_sum") or 0) > 0.05


async def test_a_stopped_process_is_not_gone_whatever_its_lock(
    host: PoolHost, workers: GpuWorkers
) -> None:
    """A lock that is dropped by hand does not prove a death."""
    pool = await make_pool(host)
    async with managed(host):
        worker, _ = await workers.start(pool, "decode-1", creates=True)
        await host.store.allocate(pool.pool_id, "h", "decode-1", 1, [], 3)
        pool.lock_path("decode-1").unlink()
        worker.send_signal(signal.SIGSTOP)
        for _ in range(5):
            await asyncio.sleep(0.02)
            assert (await host.store.stats(pool.pool_id)).num_held == 3
        worker.kill()
        await until(gone(host, pool))


async def test_the_memory_outlives_its_creator_and_the_block_manager(
    host: PoolHost, workers: GpuWorkers
) -> None:
    pool = await make_pool(host)
    async with managed(host):
        creator, found = await workers.start(pool, "decode-1", creates=True)
        assert found == "0"
        creator.kill()
        await until(gone(host, pool))
        assert (await workers.start(pool, "decode-2"))[1] == "1"
        third, found = await workers.start(pool, "decode-3")
        assert found == "2"
    third.kill()  # while there is no block manager
    third.wait()
    host.metrics = CollectorRegistry()
    async with managed(host):  # it knows the process by its record
        await until(gone(host, pool, "decode-3"))
        assert pool.worker_ids() == ("decode-2",)


async def test_memory_goes_with_its_pool(host: PoolHost, workers: GpuWorkers) -> None:
    pool, before = await make_pool(host), kept_memory()
    async with managed(host):
        worker, _ = await workers.start(pool, "decode-1", creates=True)
        worker.kill()
        await until(gone(host, pool))
        assert kept_memory() == before + 1
        pool.remove()
        await until(lambda: equals(kept_memory(), before))


def kept_memory() -> int:
    """This process's descriptors of a GPU pool's memory; this process is the block manager."""
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            links.append(fd.readlink().name)
        except FileNotFoundError:  # the one that lists them
            continue
    return sum(name.startswith("memfd:quire-MEMFD-0") for name in links)


async def lock_is_taken(pool: PoolDirectory, worker_id: str) -> bool:
    """Whether the block manager has the worker's lock: the worker is dead."""
    return worker_id in pool.live_worker_ids()
