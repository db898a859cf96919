"""Quantized checkpoints: their weights are exactly those of the dequantized twin, and their logits
those of transformers with the twin, except for the rounding of activations and KV to 16 bits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import kvops
from bench.make_checkpoint import CheckpointSpec, Family, make_checkpoint
from kvops.grouped import GroupedWeight
from kvops.int4 import Int4Weight
from kvops.int8 import Int8Weight
from services.engine.models import load_model
from services.engine.weights.checkpoint import load_weights
from services.engine.weights.dequantized import DequantizedWeights
from services.engine.weights.fused_weights import all_sections
from services.engine.weights.kinds import section_kinds
from services.model.checkpoint.check import check
from services.model.checkpoint.reading import read_model_config
from services.model.config.layout import weight_shapes
from services.model.config.quantization import Quantization
from services.runtime.errors import StartupError

from .quantized_checkpoints import (
    FILE,
    Scheme,
    awq,
    compare_answers,
    float_quantized,
    fp8_block,
    fp8_tensor,
    gptq,
    int_quantized,
    pack_quantized,
    write_quantized,
)

SPEC = CheckpointSpec(
    hidden_size=256, head_dim=64, intermediate_size=384, tied=False, dtype="float16"
)
IN_4_BITS: dict[str, Scheme] = {
    "gptq-32-asymmetric": gptq(32, symmetric=False),
    "gptq-64-v2": gptq(64, symmetric=False, version="gptq_v2"),
    "gptq-128-symmetric": gptq(128, symmetric=True),
    "awq-32": awq(32),
    "awq-128": awq(128),
    "w4a16-32-asymmetric": pack_quantized(32, symmetric=False),
    "w4a16-128-symmetric": pack_quantized(128, symmetric=True),
}
IN_8_BITS = {"w8a8": int_quantized()}
CONVERTED = {"fp8-block": fp8_block(), "fp8-tensor": fp8_tensor(), "fp8-channel": float_quantized()}
SCHEMES = IN_4_BITS | IN_8_BITS | CONVERTED


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("plain") / "model", SPEC)


def dense(directory: Path, name: str) -> Tensor:
    weight = load_weights(directory, read_model_config(directory)).linear(name)
    return weight if isinstance(weight, Tensor) else weight.dequantized()


def kinds(directory: Path, quantize: Quantization | None = None) -> dict[str, str]:
    """The kinds of the CPU."""
    config = read_model_config(directory)
    weights = DequantizedWeights(load_weights(directory, config), ("fp8", "fp8-128"))
    found = section_kinds(list(all_sections(config)), weights, torch.bfloat16, quantize)
    return dict(found)


@pytest.mark.parametrize("name", SCHEMES)
def test_every_weight_is_exact(plain: Path, tmp_path: Path, name: str) -> None:
    twin = write_quantized(plain, tmp_path / "quantized", SCHEMES[name])
    check(tmp_path / "quantized")
    exact = load_file(twin / FILE)
    for weight in weight_shapes(read_model_config(twin)):
        if weight.endswith("_proj.weight"):
            found = dense(tmp_path / "quantized", weight.removesuffix(".weight"))
            torch.testing.assert_close(found.float(), exact[weight], rtol=1e-7, atol=0)


@pytest.mark.parametrize(
    ("name", "kind", "head"),
    [
        ("gptq-32-asymmetric", "int4-32", "bfloat16"),
        ("gptq-64-v2", "int4-64", "bfloat16"),
        ("awq-128", "int4-128", "bfloat16"),
        ("w8a8", "int8", "bfloat16"),
        ("fp8-block", "bfloat16", "bfloat16"),
    ],
)
def test_linears_keep_their_kind(
    plain: Path, tmp_path: Path, name: str, kind: str, head: str
) -> None:
    write_quantized(plain, tmp_path / "quantized", SCHEMES[name])
    found = kinds(tmp_path / "quantized")
    assert found.pop("head") == head
    assert set(found.values()) == {kind}


def test_a_linear_in_floating_point_stays_so(plain: Path, tmp_path: Path) -> None:
    """A fused linear takes the widest kind of its parts."""
    write_quantized(plain, tmp_path / "quantized", awq(64), skip=("0.mlp.down", "1.self_attn.k"))
    found = kinds(tmp_path / "quantized")
    in_bf16 = {name for name, kind in found.items() if kind == "bfloat16"}
    assert in_bf16 == {"0.down", "1.qkv", "head"}


@pytest.mark.parametrize("name", SCHEMES)
def test_answers_are_those_of_the_dequantized_weights(
    plain: Path, tmp_path: Path, name: str
) -> None:
    twin = write_quantized(plain, tmp_path / "quantized", SCHEMES[name])
    compare_answers(tmp_path / "quantized", twin, bound=0.02)


@pytest.mark.parametrize(
    "name",
    ["gptq-64-v2", "awq-128", "w4a16-32-asymmetric", "w8a8", "fp8-block", "fp8-tensor"],
)
def test_composed_models_answer_with_the_dequantized_weights(
    plain: Path, tmp_path: Path, name: str
) -> None:
    """As on a GPU, by the reference: its arithmetic is that of the kernels there."""
    twin = write_quantized(plain, tmp_path / "quantized", SCHEMES[name], skip=("0.self_attn.k",))
    compare_answers(tmp_path / "quantized", twin, bound=0.02, backend="reference")


@pytest.mark.parametrize("family", ["qwen2", "llama", "mistral"])
def test_every_family_loads_quantized(tmp_path: Path, family: Family) -> None:
    plain = make_checkpoint(tmp_path / "plain", replace(SPEC, family=family, tied=True))
    twin = write_quantized(plain, tmp_path / "quantized", awq(32))
    compare_answers(tmp_path / "quantized", twin, bound=0.02)


def test_a_packed_file_is_reused(plain: Path, tmp_path: Path) -> None:
    write_quantized(plain, tmp_path / "quantized", awq(32))
    for _ in range(2):
        load_model(
            tmp_path / "quantized", torch.bfloat16, kvops.backend("cpu"), cache=tmp_path / "cache"
        )
    (file,) = (p for p in (tmp_path / "cache").iterdir() if p.suffix != ".lock")
    assert file.name.startswith("quantized-bfloat16+int4-32-")


def corrupted(
    plain: Path, tmp_path: Path, scheme: Scheme, change: Callable[[dict[str, Tensor]], object]
) -> Path:
    write_quantized(plain, tmp_path / "quantized", scheme)
    tensors = load_file(tmp_path / "quantized" / FILE)
    change(tensors)
    save_file(tensors, tmp_path / "quantized" / FILE)
    return tmp_path / "quantized"


DOWN = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("scheme", "name", "tensor", "message"),
    [
        (awq(32), "qzeros", None, f"missing tensors: {DOWN}.qzeros"),
        (awq(32), "qzeros", torch.zeros(12, 31, dtype=torch.int32), f"{DOWN}.qzeros: shape"),
        (awq(32), "qzeros", torch.zeros(12, 32), f"{DOWN}.qzeros: F32 is not I32"),
        (pack_quantized(32, True), "weight_g_idx", torch.zeros(384), "unknown tensors: "),
        (int_quantized(), "weight", torch.zeros(256, 384), f"{DOWN}.weight: F32 is not I8"),
        (
            fp8_block(),
            "weight_scale_inv",
            torch.zeros(2, 2),
            "shape [2, 2], but the config makes it [2, 3]",
        ),
    ],
    ids=[
        "a missing tensor",
        "zero points of another shape",
        "zero points of another type",
        "another tensor",
        "weights of another type",
        "scales of another shape",
    ],
)
def test_a_wrong_tensor_is_named_before_anything_starts(
    plain: Path, tmp_path: Path, scheme: Scheme, name: str, tensor: Tensor | None, message: str
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop(f"{DOWN}.{name}", None)
        if tensor is not None:
            tensors[f"{DOWN}.{name}"] = tensor

    with pytest.raises(StartupError) as error:
        check(corrupted(plain, tmp_path, scheme, change))
    assert message in str(error.value)


def load_error(directory: Path, quantize: Quantization | None = None, backend: str = "cpu") -> str:
    with pytest.raises(StartupError) as error:
        load_model(directory, torch.bfloat16, kvops.backend(backend), quantize=quantize)
    return str(error.value)


def test_inputs_in_another_order_are_refused(plain: Path, tmp_path: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{DOWN}.g_idx"] = tensors[f"{DOWN}.g_idx"].flip(0)

    error = load_error(corrupted(plain, tmp_path, gptq(32, symmetric=True), change))
    assert error == f"{DOWN}.g_idx: groups of inputs that are not neighbours (desc_act)"


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_a_bias_that_the_model_lacks_must_be_zero(
    plain: Path, tmp_path: Path, value: float
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"{DOWN}.bias"] = torch.full((256,), value)

    directory = corrupted(plain, tmp_path, gptq(32, symmetric=True), change)
    if value:
        assert "a bias that the config does not have" in load_error(directory)
    else:
        load_model(directory, torch.bfloat16, kvops.backend("cpu"))


def test_a_quantized_checkpoint_is_not_quantized_again(plain: Path, tmp_path: Path) -> None:
    write_quantized(plain, tmp_path / "quantized", awq(64))
    assert load_error(tmp_path / "quantized", "int8") == (
        "the checkpoint is already quantized (int4-64); it cannot be quantized again, to int8"
    )
    found = kinds(tmp_path / "quantized")
    assert kinds(tmp_path / "quantized", "int4") == found | {"head": "int8"}


def test_fp8_can_be_quantized(plain: Path, tmp_path: Path) -> None:
    write_quantized(plain, tmp_path / "quantized", fp8_block())
    assert set(kinds(tmp_path / "quantized", "int8").values()) == {"int8"}


def composed_kinds(directory: Path, **options: Any) -> list[str | None]:
    """The kinds of qkv, gate and up, and the head, as a GPU gets them; None in floating point."""
    ops = kvops.backend("reference")
    model: Any = load_model(directory, torch.bfloat16, ops, device="meta", **options)
    layer = model.layers[0]
    weights = layer.qkv.weight, layer.gate_up.weight, model.head
    assert all(one.codes.is_meta for one in weights if isinstance(one, GroupedWeight))
    return [getattr(weight, "kind", None) for weight in weights]


def test_composed_models_have_the_kinds_of_the_cpu(plain: Path, tmp_path: Path) -> None:
    """Weights stay packed where the model computes. A fused linear takes the widest kind of its
    parts."""
    write_quantized(plain, tmp_path / "awq", awq(64), skip=("0.self_attn.k",))
    assert composed_kinds(tmp_path / "awq") == [None, "int4-64", None]
    assert composed_kinds(tmp_path / "awq", dequantize=True) == [None] * 3
    assert composed_kinds(plain, quantize="int4") == ["int4-64", "int4-64", "int8"]
    write_quantized(plain, tmp_path / "fp8", fp8_block())
    assert composed_kinds(tmp_path / "fp8") == ["fp8-128", "fp8-128", None]
    assert composed_kinds(tmp_path / "fp8", quantize="int8") == ["int8"] * 3


def test_experts_of_composed_models_answer_with_the_dequantized_weights(tmp_path: Path) -> None:
    """They stay packed, if all linears of a layer's experts have one kind."""
    spec = replace(SPEC, family="qwen3_moe", num_experts=4, experts_per_token=2)
    plain = make_checkpoint(tmp_path / "plain", spec)
    twin = write_quantized(plain, tmp_path / "quantized", awq(32), skip=("1.mlp.experts.2.down",))
    model: Any = load_model(
        tmp_path / "quantized", torch.bfloat16, kvops.backend("reference"), device="meta"
    )
    experts = [layer.experts for layer in model.layers]
    assert [getattr(one.gate_up, "kind", None) for one in experts] == ["int4-32", "int4-32"]
    assert [getattr(one.down, "kind", None) for one in experts] == ["int4-32", None]
    compare_answers(tmp_path / "quantized", twin, bound=0.03, backend="reference")


def test_codes_are_packed_as_they_are(plain: Path, tmp_path: Path) -> None:
    """They are not quantized again: 4-bit and 8-bit linears reach the kernels as codes."""
    for name, scheme, kind in (("a", awq(64), Int4Weight), ("b", int_quantized(), Int8Weight)):
        write_quantized(plain, tmp_path / name, scheme)
        config = read_model_config(tmp_path / name)
        assert isinstance(load_weights(tmp_path / name, config).linear(DOWN), kind)
