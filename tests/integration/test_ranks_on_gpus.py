"""Ranks whose arenas and weights are on a GPU each, which is memory of the host here
(`kvops.cuda.memfd`), with gloo in the place of NCCL."""

import asyncio
import os
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from bench.make_checkpoint import make_checkpoint
from blockstore.memory_store import MemoryStore
from kvops.cuda.memfd import MemfdDriver
from kvops.cuda.vmm import DeviceLost, DriverError
from services.engine.device.opening import OpenDevice
from services.engine.ranks.calls import Call
from services.engine.ranks.rank import Rank, execute
from services.engine.weights.placement import SharedWeights
from services.pool.directory import PoolDirectory
from services.pool.header import PoolHeader
from services.pool.keeper import borrow, close_all
from services.pool.layout import PoolLayout
from services.pool.sizing import MemoryPlan
from services.worker.membership import Membership, join
from services.worker.pool_memory import GpuMemory
from services.worker.ranks.processes import Ranks

from .models_oracle import SPECS, Oracle, random_prompt
from .pool.test_gpu_pool import keeping
from .ranks import RankedRunner

NUM_BLOCKS = 40
GPUS = ["memfd:0", "memfd:1"]
LAYOUT = PoolLayout("tiny", "f", 2, 2, 16, "float32", 4, tensor_parallel_size=2)


class GpuWorker:
    """A worker of two ranks, which joins the pool in `root`."""

    def __init__(self, root: Path, store: MemoryStore, worker_id: str) -> None:
        self._root, self._store, self._id = root, store, worker_id
        self._loop = asyncio.get_running_loop()
        self.ranks = Ranks(2)
        self.shared = SharedWeights(MemfdDriver(0), root, lambda: None)

    def _join(self, layout: PoolLayout) -> Membership:
        plan = MemoryPlan(pool_bytes=2 * NUM_BLOCKS * layout.block_bytes)
        memory = GpuMemory(MemfdDriver(0), "memfd:0,memfd:1", self.ranks)
        joining = join(self._store, "run", self._root, layout, self._id, plan, memory=memory)
        return asyncio.run_coroutine_threadsafe(joining, self._loop).result()

    async def start(self, checkpoint: Path) -> RankedRunner:
        def start() -> RankedRunner:
            return RankedRunner(
                checkpoint,
                self._root,
                self.ranks,
                4,
                NUM_BLOCKS,
                devices=GPUS,
                shared=self.shared,
                join=self._join,
            )

        return await asyncio.to_thread(start)


def written(fd: int, block_bytes: int) -> set[int]:
    """The blocks of an arena in which there is something else than the test has put there."""
    blocks = (os.pread(fd, block_bytes, block_bytes * n) for n in range(NUM_BLOCKS))
    return {number for number, block in enumerate(blocks) if block.strip(b"\xff")}


async def test_two_workers_of_two_ranks_hand_over_block_ids(tmp_path: Path) -> None:
    """Tokens are those of one rank, which are transformers'. A sequence that one worker has begun
    goes on at the other, which got a block table only. Every rank writes the same blocks of the
    arena on its own GPU, and none else; it has its part of the weights there once."""
    checkpoint = make_checkpoint(tmp_path / "model", SPECS["llama-gqa"])
    store, root = MemoryStore(), tmp_path / "pools"
    root.mkdir()
    async with keeping(root):
        workers = [GpuWorker(root, store, name) for name in ("prefill-1", "decode-1")]
        with capture_logs() as logs:
            first, second = [await worker.start(checkpoint) for worker in workers]
        assert first.membership.header.gpu_uuids == ("MEMFD-0", "MEMFD-1")
        arenas = await asyncio.to_thread(borrow, root, first.membership.spec.pool_id)
        for fd in arenas:
            os.pwrite(fd, b"\xff" * os.fstat(fd).st_size, 0)
        trial = first.place(random_prompt(30, 1))
        await asyncio.to_thread(first.step, [trial], 100)
        await asyncio.to_thread(second.decode_all, [trial], 100)
        assert trial.new_tokens == Oracle(checkpoint).answer(trial.prompt).token_ids
        block_bytes = first.layout.block_bytes
        used = set(trial.block_table[: -(-(30 + len(trial.new_tokens) - 1) // 4)])
        assert [written(fd, block_bytes) for fd in arenas] == [used, used]
        contents = [os.pread(fd, block_bytes, block_bytes * min(used)) for fd in arenas]
        assert contents[0] != contents[1], "the ranks have other heads"
        close_all(arenas)
        sealed = [line for line in logs if line["event"] == "weights_sealed"]
        assert sorted(line["gpu_uuid"] for line in sealed) == ["MEMFD-0", "MEMFD-1"]
        assert len({line["weights"] for line in sealed}) == 2
        for worker, runner in zip(workers, (first, second), strict=True):
            worker.ranks.close()
            assert worker.shared.kept is not None
            worker.shared.kept.close()
            runner.membership.close()


class Broken(MemfdDriver):
    error: Exception

    def map(self, handle: int, num_bytes: int, writable: bool) -> int:
        raise self.error


def broken_rank(error: str) -> Rank:
    driver = Broken(1)
    driver.error = DriverError(f"cuMemMap on cuda:1: {error}")
    rank = Rank(1)
    rank.device = OpenDevice("memfd:1", driver)
    return rank


def test_a_rank_says_why_it_has_no_memory() -> None:
    rank = broken_rank("CUDA_ERROR_OUT_OF_MEMORY (2)")
    answer = execute(rank, Call("make_memory", (2 << 20,)))
    assert answer.failure.startswith("no memory for a pool on memfd:1: cuMemMap on cuda:1: CUDA")


def test_a_rank_that_loses_its_gpu_marks_the_pool(tmp_path: Path) -> None:
    """When it maps the arena, and in any later step; the swap pool is in a file, and stays."""
    rank = broken_rank("CUDA_ERROR_INVALID_VALUE (1)")
    memory = os.memfd_create("arena")
    own, swap = PoolDirectory(tmp_path / "own"), PoolDirectory(tmp_path / "swap")
    for directory in (own, swap):
        directory.path.mkdir()
    swap.arena(1).write_bytes(bytes(8 * LAYOUT.block_bytes))
    header = PoolHeader("pool", "run", LAYOUT, 8, 0)
    on_gpu = replace(header, kind="cuda", memory_bytes=2 << 20)
    with pytest.raises(DriverError) as error:
        rank.join([(own, on_gpu), (swap, header)], 8, os.dup(memory), os.dup(memory), memory)
    rank.note_loss(error.value)
    assert not own.gone.exists()
    rank.note_loss(DeviceLost("a step on cuda:1: CUDA_ERROR_ECC_UNCORRECTABLE (214)"))
    assert own.gone.exists()
    assert not swap.gone.exists()
