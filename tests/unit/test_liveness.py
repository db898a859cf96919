"""A worker on a GPU is reaped when it is dead and quiet: its lock dropped, its process gone, and
the driver's list without it. Each of these by itself is not enough."""

import asyncio
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from services.block_manager.gpu.processes import (
    AllProcesses,
    ProcessListError,
)
from services.block_manager.liveness import Liveness, ProcessRecord, WorkerProcesses, write_records
from services.block_manager.watcher import Watcher
from services.pool.directory import PoolDirectory
from services.pool.locks import WorkerLock
from tests.fake_gpu import list_processes
from tests.waiting import until

PID, GPU = 4711, "GPU-0001"


class FakeProcesses(WorkerProcesses):
    """`exited`: whether the pidfds report an exit."""

    exited = False

    def has_exited(self, path: Path, record: ProcessRecord) -> bool:
        assert (record.pid, record.started) == (PID, 99)
        return self.exited


class FakeNvml:
    """`listed`: the pids, or the driver's error."""

    listed: frozenset[int] | str = frozenset({PID, 1})

    def pids(self, gpu_uuid: str) -> frozenset[int]:
        assert gpu_uuid == GPU
        if isinstance(self.listed, str):
            raise ProcessListError(self.listed)
        return self.listed


class AnyGpu:
    def pids(self, gpu_uuid: str) -> frozenset[int]:
        return frozenset()


@pytest.fixture
def pool(tmp_path: Path) -> PoolDirectory:
    directory = PoolDirectory(tmp_path / "tiny-1")
    directory.workers.mkdir(parents=True)
    write_records(directory.process_path("decode-1"), [ProcessRecord(PID, 99, GPU)])
    return directory


def test_obstacles_to_reaping(pool: PoolDirectory) -> None:
    processes, nvml = FakeProcesses(), FakeNvml()
    liveness = Liveness(processes, nvml)

    def obstacle() -> str | None:
        return liveness.obstacle(pool, "decode-1")

    assert obstacle() == "process 4711 has not exited"
    nvml.listed = frozenset()
    assert obstacle() == "process 4711 has not exited"
    nvml.listed, processes.exited = frozenset({1, PID}), True
    assert obstacle() == "the driver still lists process 4711 on GPU-0001"
    nvml.listed = "NVML: the driver is not loaded"
    assert obstacle() == nvml.listed, "an error is not an answer"
    nvml.listed = frozenset({1})
    assert obstacle() is None


def test_a_list_that_never_had_a_process_does_not_show_its_end(pool: PoolDirectory) -> None:
    """In a container without the host's PID namespace, the driver lists other numbers or none."""
    record = ProcessRecord(PID, 99, GPU, is_listed=False)
    write_records(pool.process_path("decode-1"), [record])
    processes, nvml = FakeProcesses(), FakeNvml()
    processes.exited, nvml.listed = True, frozenset()
    found = Liveness(processes, nvml).obstacle(pool, "decode-1")
    assert found == "the driver has never listed process 4711 on GPU-0001"


def test_a_worker_may_finish_while_its_process_goes_on(pool: PoolDirectory) -> None:
    """A fenced worker drops its lock and joins again under another id, in the same process."""
    liveness = Liveness(FakeProcesses(), FakeNvml())
    pool.finished_path("decode-2").touch()
    assert liveness.obstacle(pool, "decode-1") is not None
    pool.finished_path("decode-1").touch()
    assert liveness.obstacle(pool, "decode-1") is None
    liveness.forget(pool, "decode-1")
    assert sorted(path.name for path in pool.workers.iterdir()) == ["decode-2.finished"]


def test_a_lost_gpu_is_not_asked(pool: PoolDirectory) -> None:
    processes, nvml = FakeProcesses(), FakeNvml()
    nvml.listed = "NVML: the GPU is lost"
    liveness = Liveness(processes, nvml)
    pool.gone.touch()
    assert liveness.obstacle(pool, "decode-1") == "process 4711 has not exited"
    processes.exited = True
    assert liveness.obstacle(pool, "decode-1") is None


def test_an_unknown_process_is_never_quiet(pool: PoolDirectory) -> None:
    liveness = Liveness(FakeProcesses(), FakeNvml())
    assert "no record" in (liveness.obstacle(pool, "decode-2") or "")
    pool.process_path("decode-1").write_text('{"pid": 1')
    assert "no record" in (liveness.obstacle(pool, "decode-1") or "")


def test_a_pool_in_a_file_needs_the_lock_only(pool: PoolDirectory) -> None:
    pool.kv.touch()
    pool.process_path("decode-1").unlink()
    assert Liveness(FakeProcesses(), FakeNvml()).obstacle(pool, "decode-1") is None


def test_a_mover_is_quiet_when_its_process_has_exited(pool: PoolDirectory) -> None:
    """A network adapter may write until then; no GPU is involved."""
    pool.kv.touch()
    write_records(pool.process_path("mover-1"), [ProcessRecord(PID, 99, "")])
    processes, nvml = FakeProcesses(), FakeNvml()
    nvml.listed = "NVML: the driver is not loaded"
    liveness = Liveness(processes, nvml)
    assert liveness.obstacle(pool, "mover-1") == "process 4711 has not exited"
    processes.exited = True
    assert liveness.obstacle(pool, "mover-1") is None


def test_a_worker_of_several_ranks_is_quiet_when_each_is_on_its_own_gpu(
    pool: PoolDirectory,
) -> None:
    """Every rank writes into the arena of its GPU, so the last one counts."""
    exited, listed = set[int](), {"GPU-0": {11, 12}, "GPU-1": {12, 11}}

    class Processes(WorkerProcesses):
        def has_exited(self, path: Path, record: ProcessRecord) -> bool:
            return record.pid in exited

    class Nvml:
        def pids(self, gpu_uuid: str) -> frozenset[int]:
            return frozenset(listed[gpu_uuid])

    liveness = Liveness(Processes(), Nvml())
    ranks = [ProcessRecord(11, 99, "GPU-0"), ProcessRecord(12, 99, "GPU-1")]
    write_records(pool.process_path("decode-1"), ranks)

    def obstacle() -> str | None:
        return liveness.obstacle(pool, "decode-1")

    exited.add(11)
    listed["GPU-0"].remove(11)
    assert obstacle() == "process 12 has not exited"
    exited.add(12)
    listed["GPU-0"].remove(12)
    assert obstacle() == "the driver still lists process 12 on GPU-1"
    listed["GPU-1"].remove(12)
    assert obstacle() is None, "what else runs on that GPU does not matter"
    write_records(pool.process_path("decode-1"), [])
    assert "is empty" in (obstacle() or "")


async def test_no_reap_while_a_condition_is_unmet(pool: PoolDirectory) -> None:
    """The block manager holds the lock meanwhile, so that all others consider the worker alive; the
    time is measured."""
    processes, nvml = FakeProcesses(), FakeNvml()
    reaped, times, asked = asyncio.Event(), list[float](), asyncio.Queue[str | None]()
    rules = Liveness(processes, nvml)

    class Asked(Liveness):
        def obstacle(self, directory: PoolDirectory, worker_id: str) -> str | None:
            found = rules.obstacle(directory, worker_id)
            loop.call_soon_threadsafe(asked.put_nowait, found)
            return found

    async def reap(directory: PoolDirectory, worker_id: str) -> None:
        reaped.set()

    loop = asyncio.get_running_loop()
    WorkerLock.create(pool.lock_path("decode-1")).close()
    watcher = Watcher(pool.path.parent, reap, Asked(processes, nvml), times.append)
    watching = asyncio.create_task(watcher.run(lambda: 0.01))
    async with asyncio.timeout(10):
        for exited, listed in ((False, "no answer"), (True, "no answer"), (True, frozenset({PID}))):
            processes.exited, nvml.listed = exited, listed
            while not asked.empty():
                asked.get_nowait()
            for _ in range(2):  # the first may have been asked before the change
                assert await asked.get() is not None
            assert not reaped.is_set()
            assert pool.live_worker_ids() == ("decode-1",)
        nvml.listed = frozenset()
        await reaped.wait()
        await until(pool.worker_ids, lambda ids: not ids)
    watching.cancel()
    assert len(times) == 1
    assert times[0] > 0.02
    assert not pool.process_path("decode-1").exists()


def test_a_process_is_known_by_its_pidfd_or_its_record(tmp_path: Path) -> None:
    """The record serves the next block manager; a pid that is used again belongs to another
    process."""
    directory = PoolDirectory(tmp_path / "tiny-1")
    directory.workers.mkdir(parents=True)
    path = directory.process_path("decode-1")
    child = os.fork()
    if child == 0:
        os.read(os.pipe()[0], 1)
        os._exit(0)
    pidfd = os.pidfd_open(child)
    first, second = WorkerProcesses(), WorkerProcesses()
    first.add(directory, "decode-1", [pidfd], [GPU], FakeNvml())
    (record,) = ProcessRecord.read(path)
    assert (record.pid, record.gpu_uuid, record.is_listed) == (child, GPU, False)
    nvml = FakeNvml()
    nvml.listed = frozenset({child})
    (record,) = first.add(directory, "decode-1", [pidfd], [GPU], nvml)
    assert (record,) == ProcessRecord.read(path)
    assert record.is_listed
    assert not first.has_exited(path, record)
    assert not second.has_exited(path, record)
    reused = ProcessRecord(child, record.started + 1, GPU)
    assert WorkerProcesses().has_exited(path, reused)
    os.kill(child, 9)
    os.waitpid(child, 0)
    assert first.has_exited(path, record)
    assert second.has_exited(path, record)
    assert WorkerProcesses().has_exited(path, record)
    for processes in (first, second):
        processes.forget(path)
    os.close(pidfd)


def test_a_mover_is_one_process_on_several_gpus(tmp_path: Path) -> None:
    directory = PoolDirectory(tmp_path / "tiny-1")
    directory.workers.mkdir(parents=True)
    path, processes = directory.process_path("mover-1"), WorkerProcesses()
    pidfd = os.pidfd_open(os.getpid())
    num_open = len(os.listdir("/proc/self/fd"))
    processes.add(directory, "mover-1", [pidfd, pidfd], ["GPU-0", "GPU-1"], AnyGpu())
    assert [record.gpu_uuid for record in ProcessRecord.read(path)] == ["GPU-0", "GPU-1"]
    processes.forget(path)
    assert len(os.listdir("/proc/self/fd")) == num_open
    os.close(pidfd)


@pytest.mark.parametrize(("mps", "pids"), [((7,), {3, 5, 7}), (None, {3, 5})])
def test_nvml_lists_processes_of_mps_too_if_it_knows_them(
    monkeypatch: pytest.MonkeyPatch, mps: tuple[int, ...] | None, pids: set[int]
) -> None:
    list_processes(monkeypatch, [SimpleNamespace(pid=pid) for pid in (3, 5)], mps)
    assert AllProcesses().pids(GPU) == pids


def test_nvml_without_a_driver_is_an_error() -> None:
    """As on this machine, where the real package finds no driver."""
    with pytest.raises(ProcessListError, match="NVML cannot list the processes of GPU-0001"):
        AllProcesses().pids(GPU)


def test_nvml_that_is_not_installed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ProcessListError, match="nvidia-ml-py is not installed"):
        AllProcesses().pids(GPU)


def test_processes_with_a_driver_of_a_memfd_use_it() -> None:
    """As with a GPU: from the first call of its driver on, and as long as they map its memory."""
    from kvops.cuda.memfd import MemfdDriver
    from kvops.cuda.vmm import SharedMemory

    assert os.getpid() not in AllProcesses().pids("MEMFD-77")
    driver = MemfdDriver(77)
    assert os.getpid() in AllProcesses().pids("MEMFD-77")
    memory = SharedMemory.create(driver, 2 << 20)
    del driver
    assert os.getpid() in AllProcesses().pids("MEMFD-77")
    memory.close()
    del memory
    assert os.getpid() not in AllProcesses().pids("MEMFD-77")
