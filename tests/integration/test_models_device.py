"""The composed model and the runner as on a GPU: all tensors on the device, inputs in one copy, and
tokens that stay on the device. Tensors on `meta` have only a device and a shape."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kvops
from bench.make_checkpoint import make_checkpoint
from kvops import Backend
from kvops.reference import ReferenceKernels
from kvops.step import AttentionCall
from services.engine.batch import Fault, Owner, Row, RowResult
from services.engine.device.inputs import Indices, StepInputs
from services.engine.forward import Flight
from services.engine.models import Batch, load_model
from services.engine.models.decoder import ComposedModel
from services.engine.runner import Runner

from .graph_steps import LaunchedKernels
from .models_oracle import GREEDY, SPECS, Oracle, random_prompt

SIZE = 4


@pytest.fixture(scope="module", params=["qwen3-gqa-tied", "qwen2-mha", "mistral-window"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp(request.param), SPECS[request.param])


def arena(model: ComposedModel, num_blocks: int, device: str) -> Tensor:
    c = model.config
    shape = (num_blocks, c.num_layers, 2, SIZE, c.num_kv_heads, c.head_dim)
    return torch.zeros(shape, dtype=model.dtype, device=device)


def composed(checkpoint: Path, device: str, backend: Backend | None = None) -> ComposedModel:
    backend = backend or kvops.backend("reference")
    model = load_model(checkpoint, torch.float32, backend, device=device)
    assert isinstance(model, ComposedModel)
    return model


# Where everything is


class OneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses every operation on tensors of two devices, except copies between them."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
        if "copy" not in str(func):
            assert len({tensor.device for tensor in tensors}) <= 1, func
        return result


class ShapeKernels(ReferenceKernels):
    """The reference without the operations that read values on the host."""

    def store_kv(self, kv_layer: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        assert {t.device for t in (kv_layer, k, v, slot_mapping)} == {kv_layer.device}

    def paged_attention(self, call: AttentionCall) -> Tensor:
        rows = (call.block_tables, call.cu_query_lens, call.context_lens)
        assert {tensor.device for tensor in rows} == {call.kv_layer.device}
        return torch.empty_like(call.q)

    def copy_blocks(self, kv: Tensor, pairs: Tensor, source: Tensor | None) -> None:
        assert pairs.device == kv.device


def test_a_step_touches_no_tensor_of_another_device(checkpoint: Path) -> None:
    ops = Backend(ShapeKernels())
    model = composed(checkpoint, "meta", ops)
    runner = Runner(model, arena(model, 8, "meta"), SIZE, ops)
    rows = [Row(range(5), 0, (0, 1), draws=(GREEDY,)), Row((7,), 3, (2,), draws=(GREEDY,))]
    with OneDevice():  # type: ignore[no-untyped-call]
        runner._steps.copy_blocks([(3, 4)])
        hidden = runner.hidden(rows)
        logits = model.logits(hidden)
    assert hidden.device.type == "meta"
    assert logits.shape == (2, model.config.vocab_size)


def test_an_arena_on_another_device_than_the_model_is_refused(checkpoint: Path) -> None:
    model = composed(checkpoint, "cpu")
    with pytest.raises(ValueError, match="the arena is on meta, the model on cpu"):
        Runner(model, arena(model, 8, "meta"), SIZE, model.ops)


def test_tied_embeddings_are_on_the_device_once(checkpoint: Path) -> None:
    model = composed(checkpoint, "meta")
    assert (model.head is model.embedding) is model.config.tied_embeddings


def test_a_layer_has_four_linears(checkpoint: Path) -> None:
    """Queries, keys and values are one of them, gate and up another."""
    model = composed(checkpoint, "cpu")
    c, layer = model.config, model.layers[0]
    assert isinstance(layer.qkv.weight, Tensor)
    assert layer.qkv.weight.shape == (
        (c.num_heads + 2 * c.num_kv_heads) * c.head_dim,
        c.hidden_size,
    )
    assert layer.gate_up is not None
    assert isinstance(layer.gate_up.weight, Tensor)
    assert layer.gate_up.weight.shape == (2 * c.intermediate_size, c.hidden_size)


# What a step is recording


@dataclass
class RecordingModel:
    """A model that records its batches."""

    model: ComposedModel
    batches: list[Batch]

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def forward(self, batch: Batch, kv: Tensor, wanted: Tensor) -> Tensor:
        self.batches.append(replace(batch, context_lens=batch.context_lens.clone()))
        return self.model.forward(batch, kv, wanted)


def test_a_batch_says_on_the_host_how_many_tokens_its_rows_have(checkpoint: Path) -> None:
    recording = RecordingModel(composed(checkpoint, "cpu"), [])
    model: Any = recording
    runner = Runner(model, arena(recording.model, 8, "cpu"), SIZE, recording.model.ops)
    runner.launch([Row(range(5), 0, (0, 1)), Row((7,), 3, (2,))])
    runner.launch([Row((8,), 4, (2, 3)), Row((1,), 5, (0, 1))])
    assert [(b.is_decode, b.max_query_len) for b in recording.batches] == [(False, 5), (True, 1)]
    assert [b.context_lens.tolist() for b in recording.batches] == [[5, 4], [5, 6]]


ARRAYS: dict[str, Indices] = {
    "a": np.arange(5, dtype=np.int64),
    "b": np.arange(6, dtype=np.int32).reshape(2, 3),
    "empty": np.zeros(0, dtype=np.int64),
    "c": np.arange(300, dtype=np.int64),
}


def test_inputs_reach_the_device_in_one_copy() -> None:
    """The inputs have several types and sizes; the memory is the same each time, unless it must
    grow."""
    inputs = StepInputs(torch.device("cpu"))
    inputs.is_copied = True
    copies: list[tuple[int, int]] = []  # target and source

    class Copies(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
        ) -> Any:
            if func is torch.ops.aten.copy_.default:
                copies.append((args[0].data_ptr(), args[1].data_ptr()))
            return func(*args, **(kwargs or {}))

    begins = []
    for factor in (1, 2, 3, 4):
        arrays = {name: array * factor for name, array in ARRAYS.items()}
        with Copies():  # type: ignore[no-untyped-call]
            placed = inputs.place(arrays)
        begins.append(placed["a"].data_ptr())
        for name, array in arrays.items():
            assert torch.equal(placed[name], torch.from_numpy(array))
    assert len(set(begins)) == 1
    sources = [source for target, source in copies if target == begins[0]]
    assert len(sources) == 4
    assert sources[0] != sources[1], "the host writes its next step beside a copy that runs"


# Tokens that stay there


class DeviceRunner(Runner):
    """A runner that works on a CPU as on a GPU; its flights are not complete at the launch."""

    def __init__(self, model: ComposedModel, kv: Tensor) -> None:
        super().__init__(model, kv, SIZE, Backend(LaunchedKernels()))
        self._inputs.is_copied = True


def tokens(results: Sequence[RowResult]) -> list[int]:
    return [token for result in results if isinstance(result, tuple) for token in result]


def test_a_row_takes_the_token_that_is_on_the_device(checkpoint: Path) -> None:
    """Greedy decoding with tokens that never reach the host gives the tokens of transformers. Rows
    change their places."""
    oracle, model = Oracle(checkpoint), composed(checkpoint, "cpu")
    runner = DeviceRunner(model, arena(model, 16, "cpu"))
    prompts = [random_prompt(n, seed=n) for n in (5, 1, 9)]
    tables = [range(5 * i, 5 * i + 5) for i in range(3)]
    order = [0, 1, 2]
    flights: list[tuple[list[int], Flight]] = []
    owners = [Owner() for _ in order]
    rows = [Row(prompts[i], 0, tables[i], draws=(GREEDY,), owner=owners[i]) for i in order]
    flights.append((order, runner.launch(rows)))
    for step in range(1, 6):
        order = [*order[1:], order[0]]
        rows = [
            replace(
                rows[0], start=len(prompts[i]) + step - 1, block_table=tables[i], owner=owners[i]
            )
            for i in order
        ]
        rows = [replace(row, token_ids=(), num_on_device=1) for row in rows]
        flights.append((order, runner.launch(rows)))
    found: dict[int, list[int]] = {i: [] for i in range(3)}
    for places, flight in flights:
        for i, token in zip(places, tokens(flight.result()), strict=True):
            found[i].append(token)
    assert found == {i: oracle.answer(prompt).token_ids for i, prompt in enumerate(prompts)}


def test_a_broken_row_is_found_out_when_its_flight_is_retired(checkpoint: Path) -> None:
    """The next step takes any token for the row; the rows beside it are not affected."""
    model = composed(checkpoint, "cpu")
    kv = arena(model, 8, "cpu")
    kv[0] = float("nan")
    runner = DeviceRunner(model, kv)
    broken, whole = Owner(), Owner()
    rows = [
        Row((1,), 3, (0,), draws=(GREEDY,), owner=broken),
        Row(range(4), 0, (2, 3), draws=(GREEDY,), owner=whole),
    ]
    first = runner.launch(rows)
    ahead = [
        Row((), 4, (0, 1), draws=(GREEDY,), owner=broken, num_on_device=1),
        Row((), 4, (2, 3), draws=(GREEDY,), owner=whole, num_on_device=1),
    ]
    second = runner.launch(ahead)
    assert [first.result()[0], second.result()[0]] == [Fault.NOT_FINITE, Fault.NOT_FINITE]
    right = Runner(model, arena(model, 8, "cpu"), SIZE, model.ops)
    (token,) = right.launch(rows[1:]).result()
    assert isinstance(token, tuple)
    (after,) = right.launch([Row(token, 4, (2, 3), draws=(GREEDY,))]).result()
    assert [first.result()[1], second.result()[1]] == [token, after]
