"""Workers on a pool in a GPU's memory, which is the host's memory here (`kvops.cuda.memfd`)."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from blockstore.errors import PoolGone
from blockstore.memory_store import MemoryStore
from kvops.cuda.memfd import MemfdDriver
from kvops.cuda.vmm import DeviceLost, DriverError, SharedMemory
from services.block_manager.gpu.keeper import Keeper
from services.block_manager.gpu.processes import AllProcesses, GpuProcesses, ProcessListError
from services.block_manager.liveness import ProcessRecord, WorkerProcesses
from services.pool import keeper as client
from services.pool.header import PoolHeader
from services.pool.recovery import PoolRecovery
from services.pool.sizing import MemoryPlan
from services.runtime.errors import StartupError
from services.worker.membership import Membership, join, join_swap_pool
from services.worker.pool_memory import FileMemory, GpuMemory, OtherRanks, PoolMemory
from tests.waiting import until

from .conftest import LAYOUT, NUM_BLOCKS, RUN_ID, die, names

PLAN = MemoryPlan(pool_bytes=NUM_BLOCKS * LAYOUT.block_bytes)
LIMIT_S = 10.0


@asynccontextmanager
async def keeping(root: Path, listed: GpuProcesses | None = None) -> AsyncIterator[Keeper]:
    keeper = Keeper(root, WorkerProcesses(), listed or AllProcesses())
    running = asyncio.create_task(keeper.run())
    await asyncio.sleep(0)  # it listens
    yield keeper
    running.cancel()
    await asyncio.wait([running])


@pytest.fixture
async def keeper(tmp_path: Path) -> AsyncIterator[Keeper]:
    async with keeping(tmp_path) as keeper:
        yield keeper


Join = Callable[..., Awaitable[Membership]]


@pytest.fixture
async def joined(store: MemoryStore, tmp_path: Path) -> AsyncIterator[Join]:
    members: list[Membership] = []

    async def joined(worker_id: str, memory: PoolMemory | None = None) -> Membership:
        memory = memory or on_gpu()
        members.append(
            await join(store, RUN_ID, tmp_path, LAYOUT, worker_id, PLAN, 0.2, memory=memory)
        )
        return members[-1]

    yield joined
    for member in members:
        member.close()


def on_gpu(number: int = 0, ranks: OtherRanks | None = None) -> GpuMemory:
    return GpuMemory(MemfdDriver(number), f"memfd:{number}", ranks)


@pytest.mark.usefixtures("keeper")
async def test_workers_map_the_memory_that_the_first_one_made(joined: Join) -> None:
    first, second = await joined("prefill-1"), await joined("decode-1")
    first.pool.kv[10, 1, 1, 3, 2, 4] = 7.0
    assert second.pool.kv[10, 1, 1, 3, 2, 4] == 7.0
    assert second.pool.kv.shape == (11, 2, 2, 4, 3, 5)
    assert not second.pool.kv[:10].any()
    header = PoolHeader.read(first.directory.header)
    assert (header.kind, header.gpu_uuids, header.memory_bytes) == ("cuda", ("MEMFD-0",), 2 << 20)
    assert header.layout == LAYOUT
    assert not first.directory.kv.exists()
    for path in (first.directory.process_path("prefill-1"), first.directory.header):
        assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.usefixtures("keeper")
async def test_memory_outlives_its_workers_and_goes_with_the_pool(
    joined: Join, store: MemoryStore, tmp_path: Path
) -> None:
    first = await joined("prefill-1")
    first.pool.kv[3] = 1.5
    first_id = first.spec.pool_id
    first.close()
    assert first.directory.finished_path("prefill-1").exists()
    del first
    second = await joined("decode-1")
    assert torch.all(second.pool.kv[3] == 1.5)
    await store.reap(second.spec.pool_id, "prefill-1")
    await second.leave()
    assert [name for name in names(tmp_path) if name.startswith("tiny")] == []
    with pytest.raises(client.KeeperRefusal):
        await asyncio.to_thread(client.borrow, tmp_path, first_id)
    assert await store.pool_ids() == ()


async def test_workers_register_again_at_a_new_keeper(joined: Join, tmp_path: Path) -> None:
    async with keeping(tmp_path):
        first = await joined("prefill-1")
        first.pool.kv[3] = 1.5
        watching = asyncio.create_task(first.watch_memory())
    async with keeping(tmp_path), asyncio.timeout(LIMIT_S):
        second = await joined("decode-1")  # waits until the first has brought the memory
        assert torch.all(second.pool.kv[3] == 1.5)
    watching.cancel()
    await asyncio.wait([watching])


class FakeRanks:
    """Rank 1, which another process is."""

    error: Exception | None = None

    def __init__(self) -> None:
        self.process = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
        self.pids = (self.process.pid,)
        self.gpu_uuids = ("MEMFD-1",)

    def make_memory(self, num_bytes: int) -> Sequence[int]:
        if self.error is not None:
            raise self.error
        memory = SharedMemory.create(MemfdDriver(1), num_bytes)
        fd = os.dup(memory.fd)
        memory.close()
        return [fd]

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def ranks() -> Iterator[FakeRanks]:
    ranks = FakeRanks()
    yield ranks
    ranks.end()


def inodes(fds: Iterable[int]) -> list[int]:
    return [os.fstat(fd).st_ino for fd in fds]


async def test_the_keeper_has_the_memory_and_the_process_of_each_rank(
    joined: Join, tmp_path: Path, ranks: FakeRanks
) -> None:
    """The same after its death; a later worker gets the memory of each rank, in their order."""
    async with keeping(tmp_path):
        first = await joined("prefill-1", on_gpu(ranks=ranks))
        assert first.header.gpu_uuids == ("MEMFD-0", "MEMFD-1")
        watching = asyncio.create_task(first.watch_memory())
        first.pool.kv[2] = 1.5
    first.directory.process_path("prefill-1").unlink()
    async with keeping(tmp_path), asyncio.timeout(LIMIT_S):
        second = await joined("decode-1", on_gpu(ranks=ranks))
        assert first.kept is not None
        assert second.kept is not None
        wanted = inodes(first.kept.fds)
        assert len(set(wanted)) == 2
        assert inodes(second.kept.fds) == wanted
        assert torch.all(second.pool.kv[2] == 1.5)
        for worker_id in ("prefill-1", "decode-1"):
            records = ProcessRecord.read(first.directory.process_path(worker_id))
            assert [(one.pid, one.gpu_uuid) for one in records] == [
                (os.getpid(), "MEMFD-0"),
                (ranks.process.pid, "MEMFD-1"),
            ]
    watching.cancel()
    await asyncio.wait([watching])


@pytest.mark.usefixtures("keeper")
async def test_ranks_on_other_gpus_are_refused(joined: Join, ranks: FakeRanks) -> None:
    await joined("prefill-1", on_gpu(ranks=ranks))
    with pytest.raises(StartupError, match=r"of MEMFD-0, MEMFD-1, .* of MEMFD-0:"):
        await joined("decode-1")


@pytest.mark.usefixtures("keeper")
async def test_a_rank_without_memory_is_a_start_that_fails(
    joined: Join, tmp_path: Path, ranks: FakeRanks
) -> None:
    ranks.error = StartupError("rank 1: no memory for a pool on cuda:1")
    memory = on_gpu(ranks=ranks)
    open_before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(StartupError, match="rank 1: no memory"):
        await joined("decode-1", memory)
    assert names(tmp_path) == ["host.lock", "keeper.sock"]
    async with asyncio.timeout(LIMIT_S):  # the keeper, in this process too, closes its end later
        while len(os.listdir("/proc/self/fd")) > open_before:
            await asyncio.sleep(0.01)


@pytest.mark.usefixtures("keeper")
async def test_a_pool_elsewhere_is_refused_with_both_places(joined: Join) -> None:
    await joined("prefill-1")
    with pytest.raises(StartupError, match=r"in the memory of MEMFD-0, .* the memory of MEMFD-1"):
        await joined("decode-1", on_gpu(1))
    with pytest.raises(StartupError, match=r"in the memory of MEMFD-0, .* a file of the host's"):
        await joined("decode-2", FileMemory())


async def test_a_file_pool_is_no_gpu_pool(joined: Join) -> None:
    await joined("prefill-1", FileMemory())
    with pytest.raises(StartupError, match=r"a file of the host's memory, .* memory of MEMFD-0"):
        await joined("decode-1")


@pytest.mark.usefixtures("keeper")
async def test_a_swap_pool_of_a_gpu_pool_is_a_file(joined: Join) -> None:
    own = await joined("prefill-1")
    swap = await join_swap_pool(own, 1 << 20)
    assert swap.header.kind == "file"
    assert swap.directory.kv.exists()
    swap.close()


async def test_without_a_block_manager_nothing_is_left(
    joined: Join, store: MemoryStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "PATIENCE_S", 0.0)
    with pytest.raises(StartupError, match=r"block manager, at .*keeper\.sock, does not register"):
        await joined("decode-1")
    assert names(tmp_path) == ["host.lock"]
    assert await store.pool_ids() == ()


async def test_a_keeper_that_cannot_list_processes_takes_no_worker(
    joined: Join, tmp_path: Path
) -> None:
    """It could never report that the worker is gone."""

    class NoNvml:
        def pids(self, gpu_uuid: str) -> frozenset[int]:
            raise ProcessListError("NVML is not here")

    async with keeping(tmp_path, NoNvml()):
        with pytest.raises(StartupError, match="MEMFD-0: NVML is not here"):
            await joined("decode-1")


class Broken(MemfdDriver):
    error: Exception

    def map(self, handle: int, num_bytes: int, writable: bool) -> int:
        raise self.error


@pytest.mark.usefixtures("keeper")
async def test_a_gpu_without_memory_is_a_start_that_fails(
    joined: Join, tmp_path: Path, store: MemoryStore
) -> None:
    driver = Broken(0)
    driver.error = DriverError("cuMemMap on cuda:0: CUDA_ERROR_OUT_OF_MEMORY (2)")
    with pytest.raises(StartupError, match=r"no memory for a pool on memfd:0: .*OUT_OF_MEMORY"):
        await joined("decode-1", GpuMemory(driver, "memfd:0"))
    assert names(tmp_path) == ["host.lock", "keeper.sock"]
    assert await store.pool_ids() == ()


@pytest.mark.usefixtures("keeper")
async def test_lost_memory_ends_its_workers_and_is_never_joined_again(joined: Join) -> None:
    first = await joined("prefill-1")
    watching = asyncio.create_task(first.watch_memory())
    driver = Broken(0)
    driver.error = DeviceLost("cuMemMap on cuda:0: CUDA_ERROR_ECC_UNCORRECTABLE (214)")
    assert not first.directory.finished_path("prefill-1").exists()
    with pytest.raises(PoolGone, match=r"memory of pool tiny-.* is lost: .*ECC_UNCORRECTABLE"):
        await joined("decode-1", GpuMemory(driver, "memfd:0"))
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.timeout(LIMIT_S):
            await watching
    assert isinstance(ended.value.exceptions[0], PoolGone)
    die(first)
    second = await joined("decode-2")
    assert second.spec.pool_id != first.spec.pool_id


async def test_a_pool_without_memory_is_replaced(joined: Join, tmp_path: Path) -> None:
    """All workers and the keeper have died."""
    async with keeping(tmp_path):
        first = await joined("prefill-1")
        first.close()
    async with keeping(tmp_path):
        second = await joined("decode-1")
    assert second.spec.pool_id != first.spec.pool_id
    assert not first.directory.path.exists()


@pytest.mark.usefixtures("keeper")
async def test_a_recovery_waits_for_workers_that_are_not_reaped(
    joined: Join, store: MemoryStore
) -> None:
    """The GPU may still write for a worker that has lost its lock (law 5)."""
    dead, first = await joined("decode-1"), await joined("prefill-1")
    die(dead)
    await PoolRecovery(first.directory).begin(lost := MemoryStore(), "run-2")
    stats = await lost.stats(first.spec.pool_id)
    assert stats.missing_worker_ids == ("decode-1", "prefill-1")


async def test_hostile_messages_do_not_harm_the_keeper(
    joined: Join, keeper: Keeper, tmp_path: Path
) -> None:
    def ask(registration: client.Registration, *fds: int) -> str:
        with pytest.raises(client.KeeperRefusal) as refused:
            client._exchange(tmp_path, registration, fds)
        return str(refused.value)

    first = await joined("prefill-1")
    pool_id = first.spec.pool_id
    open_before = len(os.listdir("/proc/self/fd"))
    pidfd, other = os.pidfd_open(os.getpid()), os.memfd_create("other")
    for registration, fds, reason in (
        (client.Registration("../tiny", "w", ("MEMFD-0",)), [pidfd], "is not a name"),
        (client.Registration(pool_id, ".hidden", ("MEMFD-0",)), [pidfd], "is not a name"),
        (client.Registration(pool_id, "w", ("MEMFD-0",)), [], "0 descriptors for 1 ranks"),
        (client.Registration(pool_id, "w", ("MEMFD-0",)), [other], "does not see the worker's"),
        (client.Registration(pool_id, "w", ("MEMFD-0", "MEMFD-1")), [pidfd] * 3, "3 descriptors"),
        (client.Registration("absent-1", "w", ("MEMFD-0",)), [pidfd], "no worker has brought"),
    ):
        assert reason in await asyncio.to_thread(ask, registration, *fds)
    os.close(pidfd)
    os.close(other)
    second = await joined("decode-1")
    second.pool.kv[0] = 3.0
    assert torch.all(first.pool.kv[0] == 3.0)
    second.close()
    await until(lambda: len(os.listdir("/proc/self/fd")) <= open_before + 4)


def test_blocks_are_of_what_the_device_has_free(tmp_path: Path) -> None:
    class Small(MemfdDriver):
        def free_and_total_bytes(self) -> tuple[int, int]:
            return 1000, 1 << 30

    memory = GpuMemory(Small(0), "cuda:0")
    with pytest.raises(StartupError, match=r"is not available: cuda:0 has 1000 bytes left"):
        memory.num_blocks(tmp_path, LAYOUT, replace(PLAN, pool_bytes=1001))
    assert on_gpu().num_blocks(tmp_path, LAYOUT, PLAN) == NUM_BLOCKS
