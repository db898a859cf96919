"""Weights once on a GPU, which is memory of the host here (`kvops.cuda.memfd`): one worker fills
them, the others map them, and no worker maps incomplete ones."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

import kvops
from bench.make_checkpoint import make_checkpoint
from kvops.cuda.memfd import MemfdDriver
from kvops.grouped import GroupedWeight
from services.block_manager.gpu.keeper import Keeper
from services.engine.models import Model, load_model
from services.engine.weights.placement import M, Placement, SharedWeights
from services.model.config.quantization import Quantization
from services.pool import kept_weights
from services.pool.keeper import KeptMemory
from services.runtime.errors import StartupError
from tests.waiting import until

from .test_gpu_pool import keeper, keeping

__all__ = ["keeper"]
LIMIT_S = 20.0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tiny"))


New = Callable[..., "Worker"]


@pytest.fixture
def new(tmp_path: Path, checkpoint: Path) -> Iterator[New]:
    """Makes workers, whose registrations end with the test."""
    workers: list[Worker] = []

    def new(quantize: Quantization | None = None) -> Worker:
        workers.append(Worker(tmp_path, checkpoint, quantize))
        return workers[-1]

    yield new
    for worker in workers:
        if worker.shared.kept is not None:
            worker.kept.close()


class Stopped(Exception):
    pass


class CountedWeights(SharedWeights):
    """Counts how often the model's files are gone through: the worker that fills the memory does so
    for the shapes, for the values and for its own tensors, another worker only for its tensors."""

    num_passes = 0

    def load(self, name: str, dtype: torch.dtype, load: Callable[[Placement], M]) -> M:
        def counted(place: Placement) -> M:
            self.num_passes += 1
            return load(place)

        return super().load(name, dtype, counted)


class Worker:
    """Loads shared weights in a thread, as a worker does."""

    def __init__(self, root: Path, checkpoint: Path, quantize: Quantization | None = None) -> None:
        self.shared = CountedWeights(MemfdDriver(0), root, lambda: None)
        self._checkpoint, self._quantize = checkpoint, quantize

    async def load(self) -> Model:
        return await asyncio.to_thread(self._load)

    def _load(self) -> Model:
        ops = kvops.backend("reference")
        return load_model(
            self._checkpoint, torch.float32, ops, quantize=self._quantize, shared=self.shared
        )

    @property
    def kept(self) -> KeptMemory:
        assert self.shared.kept is not None
        return self.shared.kept

    @property
    def inode(self) -> int:
        return os.fstat(self.kept.fd).st_ino


def tensors(model: Model) -> list[Tensor]:
    seen = [model.embedding, model.final_norm, model.head]  # type: ignore[attr-defined]
    for layer in model.layers:  # type: ignore[attr-defined]
        seen += [layer.qkv.weight, layer.down.weight]
    found: list[Tensor] = []
    for one in seen:
        is_packed = isinstance(one, GroupedWeight)
        found += [one.codes, one.scales, one.outputs] if is_packed else [one]
    return found


@pytest.mark.parametrize("quantize", [None, "int4"])
async def test_all_workers_have_the_first_ones_weights(
    keeper: Keeper,
    new: New,
    checkpoint: Path,
    quantize: Quantization | None,
) -> None:
    """They equal a copy of the worker's own, and the second worker reads no file. Weights that
    compute otherwise are in other memory."""
    alone = load_model(checkpoint, torch.float32, kvops.backend("reference"), quantize=quantize)
    await new("int8" if quantize else None).load()
    first = new(quantize)
    of_first = await first.load()
    second = new(quantize)
    of_second = await second.load()
    assert second.shared.num_passes == 1
    assert first.inode == second.inode
    for own, one, other in zip(*map(tensors, (alone, of_first, of_second)), strict=True):
        assert torch.equal(own, one)
        assert torch.equal(own, other)
        assert one.data_ptr() % 256 == 0
        assert one.data_ptr() != other.data_ptr()


async def test_workers_that_start_together_fill_once(keeper: Keeper, new: New) -> None:
    workers = [new() for _ in range(3)]
    await asyncio.gather(*(worker.load() for worker in workers))
    assert sorted(worker.shared.num_passes for worker in workers) == [1, 1, 3]
    assert len({worker.inode for worker in workers}) == 1


async def test_weights_cannot_be_written(keeper: Keeper, tmp_path: Path, checkpoint: Path) -> None:
    """A worker that tries it ends, and corrupts no other worker's weights."""
    code = """
import sys
from pathlib import Path
from tests.integration.pool.test_shared_weights import Worker, tensors
model = Worker(Path(sys.argv[1]), Path(sys.argv[2]))._load()
tensors(model)[0].fill_(1.0)
"""
    arguments = [sys.executable, "-c", code, str(tmp_path), str(checkpoint)]
    ran = await asyncio.to_thread(subprocess.run, arguments, check=False)
    assert ran.returncode == -signal.SIGSEGV


FILLER = """
import sys, time
from pathlib import Path
from services.engine.weights.placement import _Packed
from tests.integration.pool.test_shared_weights import Worker

def fill(packed, parts, like=None):
    print("filling", flush=True)
    time.sleep(3600)

_Packed.fill = fill
Worker(Path(sys.argv[1]), Path(sys.argv[2]))._load()
"""


def started(code: str, *arguments: Path) -> "subprocess.Popen[str]":
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


async def test_a_worker_that_dies_while_it_fills_leaves_nothing(
    keeper: Keeper, new: New, tmp_path: Path, checkpoint: Path
) -> None:
    """The worker that waited for it fills new memory."""
    filler = started(FILLER, tmp_path, checkpoint)
    assert filler.stdout is not None
    assert await asyncio.to_thread(filler.stdout.readline) == "filling\n"
    worker = new()
    loading = asyncio.create_task(worker.load())
    await asyncio.sleep(0.3)  # it waits, however long
    assert not loading.done()
    filler.kill()
    async with asyncio.timeout(LIMIT_S):
        model = await loading
    alone = load_model(checkpoint, torch.float32, kvops.backend("reference"))
    for own, shared in zip(tensors(alone), tensors(model), strict=True):
        assert torch.equal(own, shared)
    filler.wait()
    filler.stdout.close()


async def test_a_worker_that_waits_can_be_stopped(keeper: Keeper, tmp_path: Path) -> None:
    key = kept_weights.WeightsKey("any", "MEMFD-0")
    filling = await asyncio.to_thread(kept_weights.WeightsClaim, tmp_path, key, lambda: None)
    assert filling.found is None
    stopped = threading.Event()

    def progress() -> None:
        if stopped.is_set():
            raise Stopped

    waiting = asyncio.create_task(
        asyncio.to_thread(kept_weights.WeightsClaim, tmp_path, key, progress)
    )
    await asyncio.sleep(0.2)
    stopped.set()
    with pytest.raises(Stopped):
        await waiting
    filling.close()
    third = await asyncio.to_thread(kept_weights.WeightsClaim, tmp_path, key, lambda: None)
    assert third.found is None, "the one that stopped is not waited for"
    third.close()


def events(logs: Sequence[Mapping[str, Any]]) -> list[str]:
    return [line["event"] for line in logs]


async def test_weights_outlive_the_keeper(tmp_path: Path, new: New) -> None:
    """A worker registers its memory with the next keeper."""
    worker = new()
    async with keeping(tmp_path):
        await worker.load()
        keep = asyncio.create_task(worker.kept.keep())
    async with keeping(tmp_path):
        with capture_logs() as logs:
            await until(lambda: "weights_sealed" in events(logs))
        later = new()
        await later.load()
        assert later.inode == worker.inode
        keep.cancel()
        await asyncio.wait([keep])


async def test_weights_that_nobody_uses_are_given_up(keeper: Keeper, new: New) -> None:
    workers = [new() for _ in range(2)]
    for worker in workers:
        await worker.load()
    with capture_logs() as logs:
        workers[0].kept.close()
        await asyncio.sleep(0.1)
        assert not events(logs)
        workers[1].kept.close()
        await until(lambda: events(logs) == ["weights_released"])


async def test_no_keeper_is_an_error(new: New, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_weights, "PATIENCE_S", 0.1)
    with pytest.raises(StartupError, match="no block manager at"):
        await new().load()
