"""The common part of tests of CUDA graphs: kernels that count as launches, and sequences that come
and go. The graphs are those of `tests.graph_stand_in`."""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from kvops import Backend
from kvops.draws import DrawTensors, PenaltyTables
from kvops.reference import ReferenceKernels
from services.engine.batch import Draw, Owner, Row, RowResult
from services.engine.device.graphs import GraphShape, graph_shapes
from services.engine.models import load_model
from services.engine.models.decoder import ComposedModel
from services.engine.runner import Runner
from services.engine.sampling.sampler import greedy
from tests.graph_stand_in import RecordedGraph, launched
from tests.kernels import flashinfer_stand_in

from .models_oracle import random_prompt

SIZE = 4
BLOCKS_EACH = 8
MAX_ROWS = 6
KERNELS = (
    *("store_kv", "paged_attention", "linear", "rms_norm", "add_rms_norm", "rope", "silu_mul"),
    "clear_begun_blocks",
)


class LaunchedKernels(ReferenceKernels):
    """The reference, whose operations each count as one launch."""

    reads_whole_blocks = True
    has_sampler = True

    def sample(self, logits: Tensor, draws: DrawTensors, tables: PenaltyTables | None) -> Tensor:
        """The likeliest tokens."""
        return greedy(logits[draws.state.long()])


for _name in KERNELS:
    setattr(LaunchedKernels, _name, launched(getattr(ReferenceKernels, _name)))


@dataclass
class PlannedBackends:
    """Makes backends with FlashInfer's calls, to its stand-in; all other operations are the
    reference's. `wrappers` are those of FlashInfer that the backends have made."""

    kernels: type[Any]
    wrappers: list[Any]

    def __call__(self) -> Backend:
        return Backend(self.kernels())

    def rows_of_graphs(self) -> Counter[int]:
        """How many of the wrappers are for a graph of so many rows."""
        return Counter(len(one.buffers[3]) for one in self.wrappers if one.in_graph)


@contextmanager
def planned_kernels() -> Iterator[PlannedBackends]:
    """FlashInfer's stand-in takes the package's place meanwhile."""
    wrappers: list[Any] = []

    class Wrapper(flashinfer_stand_in.BatchPrefillWithPagedKVCacheWrapper):
        run = launched(flashinfer_stand_in.BatchPrefillWithPagedKVCacheWrapper.run)

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            wrappers.append(self)

        def plan(self, qo_indptr: Tensor, *args: Any, **kwargs: Any) -> None:
            if not self.plans:
                self.query_len = int(qo_indptr.diff().max())
            super().plan(qo_indptr, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        stand_in = ModuleType("flashinfer")
        stand_in.__dict__.update(vars(flashinfer_stand_in))
        patch.setattr(stand_in, "BatchPrefillWithPagedKVCacheWrapper", Wrapper, raising=False)
        patch.setitem(sys.modules, "flashinfer", stand_in)
        patch.delitem(sys.modules, "kvops.attention.flashinfer", raising=False)
        from kvops.attention.flashinfer import FlashInferKernels

        names = ("__init__", "plan", "_planned_wrapper", "_wrapper", "paged_attention")
        methods = {name: vars(FlashInferKernels)[name] for name in names}

        def owned(kernels: Any, *args: Any) -> Any:
            wrapper = FlashInferKernels._wrapper(kernels, *args)
            wrapper.owner = kernels
            return wrapper

        methods["_wrapper"] = owned
        kernels = type("Planned", (LaunchedKernels,), {**methods, "needs_plan": True})
        patch.setattr("kvops.attention.flashinfer._SPLIT", 8)
        yield PlannedBackends(kernels, wrappers)
        sys.modules.pop("kvops.attention.flashinfer")


class DeviceRunner(Runner):
    """A runner that works on a CPU as on a GPU."""

    def __init__(self, checkpoint: Path, dtype: torch.dtype, ops: Backend) -> None:
        model = load_model(checkpoint, dtype, ops)
        assert isinstance(model, ComposedModel)
        self.model = model
        c = model.config
        shape = (1 + BLOCKS_EACH * MAX_ROWS, c.num_layers, 2, SIZE, c.num_kv_heads, c.head_dim)
        self.kv = torch.zeros(shape, dtype=dtype)
        self.kv[0] = float("nan")  # of no sequence: padded rows name this block
        super().__init__(model, self.kv, SIZE, ops)
        self._inputs.is_copied = True

    def with_graphs(
        self, max_tokens: int = 0, max_rows: int = MAX_ROWS, max_lora_rank: int = 0
    ) -> "DeviceRunner":
        self.graphs: list[RecordedGraph] = []

        def new_graph() -> RecordedGraph:
            self.graphs.append(RecordedGraph())
            return self.graphs[-1]

        self.capture_graphs(max_rows, max_tokens, new_graph, max_lora_rank)
        with_adapters = max_lora_rank > 0 and self._ops.has_low_rank
        shapes = reversed(graph_shapes(max_rows, max_tokens, with_adapters=with_adapters))
        self.graph_of = dict[GraphShape, RecordedGraph](zip(shapes, self.graphs, strict=True))
        return self

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)


def table(number: int) -> range:
    return range(1 + number * BLOCKS_EACH, 1 + (number + 1) * BLOCKS_EACH)


def generate(runner: Runner, prompts: list[tuple[int, ...]], draws: Sequence[Draw]) -> Any:
    """Step n has the sequences that have begun by then and have not ended: 1, 2 .. 6 .. 2, 1. Rows
    take tokens that are still on the device, since flights are retired one step late."""
    tokens: dict[int, list[int]] = {i: [] for i in range(len(prompts))}
    positions = [len(prompt) for prompt in prompts]
    pending: tuple[list[int], Any] = ([], None)
    live: list[int] = []
    owners = [Owner() for _ in prompts]

    def retire() -> None:
        for i, result in zip(pending[0], pending[1].result() if pending[1] else (), strict=True):
            tokens[i].append(only(result))

    for step in range(14):
        if step < len(prompts):
            retire()
            flight = runner.launch([Row(prompts[step], 0, table(step), draws=(draws[step],))])
            tokens[step].append(only(flight.result()[0]))
            pending = ([], None)
            live = [step, *live]
        elif step > 9:
            live = live[1:]
        rows = []
        for i in live:
            ahead = i in pending[0]
            row = Row((tokens[i][-1],), positions[i], table(i), draws=(draws[i],), owner=owners[i])
            rows.append(replace(row, token_ids=(), num_on_device=1) if ahead else row)
            positions[i] += 1
        flight = runner.launch(rows)
        retire()
        pending = (list(live), flight)
    retire()
    return tokens


def only(result: RowResult) -> int:
    assert isinstance(result, tuple), result
    return result[0]


PROMPTS = [random_prompt(n, seed=n) for n in (5, 1, 9, 2, 13, 3)]
