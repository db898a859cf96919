"""The table of the division of weights among ranks."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bench.gpu.model import make_config
from kvops import int4, int8
from kvops.fp4 import Float4Weight
from kvops.fp8 import Float8Weight
from services.engine.weights.sharded import ShardedWeights
from services.engine.weights.weights import Form, Weight
from services.model.checkpoint.shards import SPLITS, check_shards, shards
from services.model.config.families import FAMILIES
from services.model.config.layout import EMBEDDING, weight_shapes
from services.model.config.model_config import ModelConfig
from services.runtime.errors import StartupError

CONFIG = replace(
    make_config(1, 256, 387), num_heads=8, num_kv_heads=4, head_dim=6, o_bias=True, mlp_bias=True
)

WIDER = replace(CONFIG, head_dim=8, intermediate_size=192)


class Whole:
    def __init__(self, config: ModelConfig) -> None:
        draw = torch.Generator().manual_seed(0)
        shapes = weight_shapes(config)
        self.tensors = {n: torch.randn(shape, generator=draw) for n, shape in shapes.items()}

    def form(self, linear: str) -> Form:
        return "float"

    def linear(self, linear: str) -> Tensor:
        return self.tensors[f"{linear}.weight"]


def parts(config: ModelConfig, size: int) -> tuple[Whole, list[ShardedWeights]]:
    whole = Whole(config)
    return whole, [ShardedWeights(whole, shard) for shard in shards(config, size)]


def test_every_weight_is_divided_or_a_norm() -> None:
    for name in weight_shapes(CONFIG):
        module = name.split(".")[-2]
        assert (module in SPLITS) != module.endswith("norm")


@pytest.mark.parametrize("size", [1, 2, 4])
def test_parts_make_up_the_whole_weights(size: int) -> None:
    """Every row or column belongs to exactly one rank, in the order of the ranks."""
    whole, found = parts(CONFIG, size)
    for name, tensor in whole.tensors.items():
        module, kind = name.split(".")[-2:]
        dimension = SPLITS[module][0] if module in SPLITS else None
        pieces = [one.tensors[name] for one in found if name in one.tensors]
        if dimension is None:
            assert all(torch.equal(piece, tensor) for piece in pieces)
            assert len(pieces) == size
        elif dimension == 1 and kind == "bias":
            assert [name in one.tensors for one in found] == [True] + [False] * (size - 1)
            assert torch.equal(pieces[0], tensor)
        else:
            assert torch.equal(torch.cat(pieces, dimension), tensor)
        if kind == "weight" and dimension is not None:
            linear = name.removesuffix(".weight")
            weights = [(one.linear(linear), one.tensors[name]) for one in found]
            assert all(isinstance(a, Tensor) and torch.equal(a, b) for a, b in weights)


@pytest.mark.parametrize("size", [2, 4])
def test_linears_of_parts_add_up_to_the_whole_linear(size: int) -> None:
    """Column-parallel, then row-parallel, with biases, compared with the full matrices in fp64."""
    whole, found = parts(CONFIG, size)
    up, down = (f"model.layers.0.mlp.{name}_proj" for name in ("up", "down"))

    def mlp(tensors: Mapping[str, Tensor], x: Tensor) -> Tensor:
        t = {name: value.double() for name, value in tensors.items()}
        inner = torch.relu(x @ t[f"{up}.weight"].T + t[f"{up}.bias"])
        return inner @ t[f"{down}.weight"].T + t.get(f"{down}.bias", torch.zeros(1).double())

    x = torch.randn(3, CONFIG.hidden_size, dtype=torch.float64)
    total = torch.stack([mlp(one.tensors, x) for one in found]).sum(0)
    torch.testing.assert_close(total, mlp(whole.tensors, x))


def test_views_of_parts_cost_no_memory() -> None:
    whole, found = parts(CONFIG, 2)
    for one in found:
        for name, tensor in one.tensors.items():
            assert (
                tensor.untyped_storage().data_ptr()
                == whole.tensors[name].untyped_storage().data_ptr()
            )


def test_a_vocabulary_that_does_not_divide_differs_by_one_token() -> None:
    widths = [shard.vocabulary for shard in shards(CONFIG, 4)]
    assert widths == [slice(0, 97), slice(97, 194), slice(194, 291), slice(291, 387)]


@pytest.mark.parametrize(
    ("num_kv_heads", "size", "heads"),
    [(4, 4, [0, 1, 2, 3]), (2, 4, [0, 0, 1, 1]), (1, 4, [0, 0, 0, 0]), (2, 8, [0] * 4 + [1] * 4)],
)
def test_kv_heads_are_those_of_the_ranks_query_heads(
    num_kv_heads: int, size: int, heads: list[int]
) -> None:
    """With fewer KV heads than ranks, several ranks have a copy of one."""
    config = replace(CONFIG, num_kv_heads=num_kv_heads)
    found = shards(config, size)
    assert [shard.part("kv_heads") for shard in found] == [slice(6 * h, 6 * h + 6) for h in heads]
    assert {shard.own_config.num_kv_heads for shard in found} == {1}
    group = config.num_heads // num_kv_heads
    for shard, head in zip(found, heads, strict=True):
        queries = shard.part("heads")
        assert queries.start // 6 // group == head == (queries.stop - 1) // 6 // group


@pytest.mark.parametrize(
    ("change", "size", "text"),
    [
        ({"num_heads": 6}, 4, "6 query heads are not a multiple"),
        ({"intermediate_size": 70}, 4, "70 columns of the MLP are not a multiple"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "3 key/value heads are neither"),
        ({"vocab_size": 3}, 4, "a vocabulary of 3 has fewer tokens"),
        (
            {"architecture": "Olmo2ForCausalLM", "family": FAMILIES["Olmo2ForCausalLM"]},
            2,
            "the norm over all heads of Olmo2ForCausalLM is not divided",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused_with_the_numbers(
    change: dict[str, Any], size: int, text: str
) -> None:
    config = replace(CONFIG, **change)
    with pytest.raises(StartupError, match=f"tensor_parallel_size {size}: {text}"):
        check_shards(config, size)
    check_shards(config, 1)


QUANTIZED: dict[Form, Callable[[Tensor], Weight]] = {
    "int4-32": lambda weight: int4.quantize(weight, 32),
    "int8-16": lambda weight: int8.quantize(weight, 16),
    "mxfp4": lambda weight: Float4Weight(
        weight.abs().mul(5).to(torch.uint8) & 15,
        (weight[:, ::32].abs() * 9).to(torch.uint8) + 120,
    ),
    "fp8": lambda weight: Float8Weight(
        weight.to(torch.float8_e4m3fn).view(torch.uint8),
        weight[:, :1].abs().repeat(1, -(-weight.shape[1] // 128)),
    ),
}


class Quantized(Whole):
    """Linears of one form, and `exact`, their dequantized weights."""

    def __init__(self, config: ModelConfig, form: Form) -> None:
        super().__init__(config)
        self._form = form
        linears = [name for name, one in self.tensors.items() if one.dim() == 2]
        self.weights = {
            name.removesuffix(".weight"): QUANTIZED[form](self.tensors.pop(name))
            for name in linears
            if name != EMBEDDING
        }

    def form(self, linear: str) -> Form:
        return self._form

    def linear(self, linear: str) -> Weight:  # type: ignore[override]
        return self.weights[linear]


@pytest.mark.parametrize("form", QUANTIZED)
def test_quantized_parts_mean_the_parts_of_the_weights(form: Form) -> None:
    """They are divided along whole groups of inputs, and keep their codes and scales."""
    whole = Quantized(WIDER, form)
    found = [ShardedWeights(whole, shard) for shard in shards(WIDER, 2)]
    for linear, weight in whole.weights.items():
        assert not isinstance(weight, Tensor)
        pieces = [one.linear(linear) for one in found]
        values = [piece.dequantized() for piece in pieces if not isinstance(piece, Tensor)]
        dimension = SPLITS[linear.split(".")[-1]][0]
        assert torch.equal(torch.cat(values, dimension), weight.dequantized())


def test_groups_that_ranks_would_cut_are_refused_with_the_numbers() -> None:
    whole = Quantized(WIDER, "int4-32")
    found = [ShardedWeights(whole, shard) for shard in shards(WIDER, 4)]
    found[1].linear("model.layers.0.mlp.up_proj")
    text = "size 4: inputs 48 to 96 of model.layers.0.mlp.down_proj are no whole groups of 32"
    with pytest.raises(StartupError, match=f"{text}.*--quantize none"):
        found[1].linear("model.layers.0.mlp.down_proj")
