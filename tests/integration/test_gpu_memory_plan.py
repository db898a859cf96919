"""The pool's size on a GPU: the usable share minus the workers' needs. The step runs on the CPU
here, and the test's meter gives its memory."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvops
from bench.make_checkpoint import make_checkpoint
from kvops.cuda.memfd import MemfdDriver
from services.engine.batch import Row, RowOutput
from services.engine.device.gpu_memory import CudaMeter, GpuMemoryPlan, profile
from services.engine.forward import Flight
from services.engine.models import load_model
from services.engine.runner import Runner
from services.engine.sampling.sampling_batch import SamplingBatch
from services.engine.weights.placement import SharedWeights
from services.pool.layout import PoolLayout
from services.runtime.errors import StartupError
from tests.fake_gpu import list_processes

GIB = 1 << 30


def test_the_pool_gets_what_the_gpu_has_left() -> None:
    """80 GiB at 0.9, two workers with 16 + 1.5 + 0.5 GiB each: 36 GiB are left."""
    plan = GpuMemoryPlan(80 * GIB, 0.9, 2, 16 * GIB, 3 * GIB // 2, GIB // 2)
    assert plan.pool == 36 * GIB
    assert plan.fields(block_bytes=GIB) == {
        "total": 80 * GIB,
        "utilization": 0.9,
        "num_workers": 2,
        "weights": 16 * GIB,
        "activations": 3 * GIB // 2,
        "other": GIB // 2,
        "graphs": 0,
        "shared_weights": 0,
        "draft": 0,
        "pool": 36 * GIB,
        "num_blocks": 36,
    }


def test_the_pool_gets_what_is_left_beside_shared_weights() -> None:
    """80 GiB at 0.9, 16 GiB once, two workers with 1.5 + 1 + 0.5 GiB each: 50 GiB are left."""
    plan = GpuMemoryPlan(80 * GIB, 0.9, 2, 0, 3 * GIB // 2, GIB // 2, GIB, 16 * GIB)
    assert plan.pool == 50 * GIB


def test_a_draft_model_counts_for_each_worker() -> None:
    """80 GiB at 0.9, 16 GiB once, two workers with 1.5 + 1 + 0.5 GiB and 3 GiB for the draft model
    each: 44 GiB are left."""
    plan = GpuMemoryPlan(80 * GIB, 0.9, 2, 0, 3 * GIB // 2, GIB // 2, GIB, 16 * GIB, 3 * GIB)
    assert plan.pool == 44 * GIB


def test_a_gpu_that_is_too_small_is_refused_with_the_numbers() -> None:
    plan = GpuMemoryPlan(24 * GIB, 0.5, 2, 6 * GIB, 0, 0)
    with pytest.raises(
        StartupError, match=r"0\.5 of the GPU's 24\.00 GiB .*: 2 workers take 12.* each 6.*"
    ):
        _ = plan.pool


class Meter:
    """A meter that gives the expected values and checks the order of the calls. Each of `graphs`
    takes 10 bytes."""

    def __init__(self, graphs: Sequence[object] = ()) -> None:
        self.asked: list[str] = []
        self._graphs = graphs

    def total(self) -> int:
        return 1000

    def tensors(self) -> int:
        self.asked.append("tensors")
        return 100 + 7 * self.asked.count("tensors")

    def reset_peak(self) -> None:
        self.asked.append("reset")

    def peak(self) -> int:
        peak = 999 if "used" in self.asked else 164  # that of graphs is no step's
        self.asked.append("peak")
        return peak

    def used(self) -> int:
        self.asked.append("used")
        return 500 + 10 * len(self._graphs)

    def other(self) -> int:
        return 9


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "lens"),
    [(40, 3, [14, 13, 13]), (8, 8, [1] * 8), (4, 8, [1] * 4), (10_000, 1, [4096])],
)
def test_the_largest_step_is_measured(
    tmp_path: Path, num_tokens: int, num_rows: int, lens: list[int]
) -> None:
    """It has all tokens, draws from all rows and needs all states, with at most the context each.
    The arena of one block and the weights are no activations."""
    ops = kvops.backend("reference")
    model = load_model(make_checkpoint(tmp_path / "tiny"), torch.float32, ops)
    layout = PoolLayout("tiny", "f", 2, 2, 16, "float32", 16)
    steps: list[list[Row]] = []

    class WatchedRunner(Runner):
        def launch(self, rows: Sequence[Row], copies: Any = ()) -> Flight:
            steps.append(list(rows))
            before = arenas[-1].clone()
            flight = super().launch(rows, copies)
            assert torch.equal(arenas[-1], before), "it stores nothing"
            results = flight.result()
            assert len(results) == len(lens)
            assert all(isinstance(result, RowOutput) and result.logprobs for result in results)
            return flight

    arenas: list[torch.Tensor] = []

    def new_runner(kv: torch.Tensor) -> Runner:
        arenas.append(kv)
        return WatchedRunner(model, kv, 16, ops)

    meter = Meter()
    plan = profile(
        meter,
        model.device,
        new_runner,
        layout,
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_workers=2,
        utilization=0.8,
    )
    assert [[len(row.token_ids) for row in rows] for rows in steps] == [lens]
    draws = [draw for row in steps[0] for draw in row.draws]
    assert all(draw.adjustment and draw.grammar for draw in draws)
    assert len({id(draw.adjustment.state) for draw in draws if draw.adjustment}) == len(lens)
    assert steps[0][0].scoring is not None
    assert set(SamplingBatch.of(steps[0]).wanted) == set(range(sum(lens)))
    assert meter.asked == ["tensors", "tensors", "reset", "peak"]
    assert plan == GpuMemoryPlan(1000, 0.8, 2, weights=107, activations=50, other=9)
    assert plan.pool == 800 - 2 * 166


def test_graphs_and_shared_weights_are_counted_once(tmp_path: Path) -> None:
    """Graphs of all shapes are recorded for their memory, on an arena of one block: of 1, 2, 3 and
    4 rows, and of 4 and 8 tokens. The driver's share of the shared weights for this process is
    not counted again."""
    ops = kvops.backend("reference")
    model = load_model(make_checkpoint(tmp_path / "tiny"), torch.float32, ops)
    graphs: list[object] = []

    class CountedGraph:
        def __init__(self) -> None:
            graphs.append(self)

        def capture(self, launch: Callable[[], torch.Tensor]) -> torch.Tensor:
            return launch()

        def replay(self) -> None:
            raise AssertionError("only recorded")

    shared = SharedWeights(MemfdDriver(0), tmp_path, lambda: None)
    shared.num_bytes, shared.counted = 200, 4
    plan = profile(
        Meter(graphs),
        model.device,
        lambda kv: Runner(model, kv, 16, ops),
        PoolLayout("tiny", "f", 2, 2, 16, "float32", 16),
        num_tokens=8,
        num_rows=4,
        num_workers=2,
        utilization=0.8,
        shared=shared,
        graph_rows=4,
        new_graph=CountedGraph,
    )
    assert plan == GpuMemoryPlan(1000, 0.8, 2, 107, 50, other=5, graphs=60, shared_weights=200)
    assert plan.pool == 800 - 200 - 2 * 222


def test_memory_of_freed_tensors_is_not_a_process_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The capture of a graph gives it back, so it would hide the memory of the first graphs."""
    process = SimpleNamespace(pid=os.getpid(), usedGpuMemory=900)

    def empty_cache() -> None:
        process.usedGpuMemory = 500

    list_processes(monkeypatch, [process])
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    assert CudaMeter(torch.device("cuda:0"), "GPU-1").used() == 500


def test_missing_figures_of_nvml_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine the real package finds no driver; elsewhere containers hide processes."""
    meter = CudaMeter(torch.device("cuda:0"), "GPU-1")
    with pytest.raises(StartupError, match="NVML does not tell this process's memory"):
        meter.other()
    list_processes(monkeypatch, [])
    with pytest.raises(StartupError, match=r"does not list process .* \(pid: host\)"):
        meter.other()
