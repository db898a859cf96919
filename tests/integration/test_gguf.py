"""GGUF files: weights, configuration and answers equal those of the same model as a Hugging Face
checkpoint."""

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

import kvops
from bench.make_checkpoint import CheckpointSpec, Family, make_checkpoint
from kvops import int8
from kvops.int4 import Int4Weight
from kvops.int8 import Int8Weight
from kvops.native import usable_kernels
from kvops.quantized import stored
from quire.supervisor.model_source import find_model
from services.engine.models import load_model
from services.engine.models.rope import rope_tables
from services.engine.weights.checkpoint import load_weights, weights_digest
from services.engine.weights.fused_weights import all_sections
from services.engine.weights.gguf_weights import affine
from services.engine.weights.kinds import section_kinds
from services.model.checkpoint.check import check
from services.model.checkpoint.reading import read_model_config
from services.model.config.layout import EMBEDDING, weight_shapes
from services.model.config.rope_config import FrequencyDivisors
from services.runtime.errors import StartupError

from .gguf_checkpoints import Metadata, number_refused, write_gguf, write_twin
from .models_oracle import LLAMA3_ROPE
from .quantized_checkpoints import compare_answers

SPEC = CheckpointSpec(hidden_size=256, head_dim=64, intermediate_size=512, tied=False)
FLOATS = ("F32", "F16", "BF16")
IN_4_BITS = ("Q4_0", "Q4_1", "Q4_K")
IN_8_BITS = (
    *("Q8_0", "Q5_0", "Q5_1", "Q5_K", "Q6_K", "Q3_K", "Q2_K"),
    *("IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS", "IQ2_S", "IQ2_XS", "IQ2_XXS"),
)
FAMILIES: tuple[Family, ...] = ("llama", "qwen2", "qwen3")


def q4_k_m(name: str) -> str:
    """llama.cpp's mix: the values and down projections of some layers, and the head, have 6
    bits."""
    if name in ("output.weight", "blk.0.ffn_down.weight", "blk.0.attn_v.weight"):
        return "Q6_K"
    return "Q4_K"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama, whose queries and keys GGUF stores in another order."""
    directory = tmp_path_factory.mktemp("plain") / "model"
    return make_checkpoint(directory, replace(SPEC, family="llama"))


def dense(path: Path, name: str) -> Tensor:
    """A tensor as the engine reads it, in fp32."""
    weights = load_weights(path, read_model_config(path))
    if name in weights.tensors:
        return weights.tensors[name].float()
    weight = weights.linear(name.removesuffix(".weight"))
    return weight.float() if isinstance(weight, Tensor) else weight.dequantized()


def kinds(path: Path) -> dict[str, str]:
    config = read_model_config(path)
    weights = load_weights(path, config)
    return dict(section_kinds(list(all_sections(config)), weights, torch.bfloat16, None))


@pytest.mark.parametrize("kind", [*FLOATS, *IN_4_BITS, *IN_8_BITS])
def test_weights_of_every_type(plain: Path, tmp_path: Path, kind: str) -> None:
    """As the `gguf` package dequantizes them; the embedding is rounded to bf16."""
    path = tmp_path / "model.gguf"
    exact = write_gguf(plain, path, lambda name: kind)
    for name in weight_shapes(read_model_config(path)):
        limit = 2.0**-8 if name == EMBEDDING else 1e-6
        size = float(exact[name].abs().max())
        torch.testing.assert_close(dense(path, name), exact[name], rtol=0, atol=limit * size)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_is_the_same_model(tmp_path: Path, family: Family, tied: bool) -> None:
    """In fp32, with biases: the configuration is that of config.json, except for fields that GGUF
    lacks."""
    spec = replace(SPEC, family=family, tied=tied, attention_bias=family == "llama")
    plain = make_checkpoint(tmp_path / "plain", spec)
    exact = write_gguf(plain, tmp_path / "model.gguf")
    ours, theirs = (read_model_config(p) for p in (tmp_path / "model.gguf", plain))
    assert ours.rms_norm_eps == pytest.approx(1e-6)
    assert ours == replace(theirs, rms_norm_eps=ours.rms_norm_eps)
    assert exact.keys() == load_file(plain / "model.safetensors").keys()
    for name, tensor in exact.items():
        assert torch.equal(dense(tmp_path / "model.gguf", name), tensor)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("kind", ["F16", "Q8_0"])
def test_transformers_reads_the_same_weights(tmp_path: Path, family: Family, kind: str) -> None:
    """transformers maps the names and the order of rows itself."""
    plain = make_checkpoint(tmp_path / "plain", replace(SPEC, family=family))
    write_gguf(plain, tmp_path / "model.gguf", lambda name: kind)
    model = AutoModelForCausalLM.from_pretrained(plain, local_files_only=True)
    load: Any = load_gguf_checkpoint
    theirs = load(tmp_path / "model.gguf", return_tensors=True, model_to_load=model)["tensors"]
    for name in weight_shapes(read_model_config(tmp_path / "model.gguf")):
        if name != EMBEDDING:
            ours = dense(tmp_path / "model.gguf", name)
            torch.testing.assert_close(ours, theirs[name], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("choose", "bound"),
    [
        (lambda name: "BF16", 0.02),
        (lambda name: "F16", 0.02),
        (lambda name: "Q8_0", 0.02),
        (lambda name: "Q4_0", 0.02),
        (lambda name: "Q4_1", 0.02),
        # Tiles round the weights to bf16, and one near-tie of these random weights shows it.
        (q4_k_m, 0.025 if usable_kernels()[0] == "amx" else 0.02),
    ],
    ids=["BF16", "F16", "Q8_0", "Q4_0", "Q4_1", "Q4_K_M"],
)
def test_answers_are_those_of_the_dequantized_weights(
    plain: Path, tmp_path: Path, choose: Callable[[str], str], bound: float
) -> None:
    path = tmp_path / "model.gguf"
    twin = write_twin(plain, tmp_path / "twin", write_gguf(plain, path, choose))
    compare_answers(path, twin, bound)


def test_linears_of_several_types_take_the_wider_kind(plain: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(plain, path, q4_k_m)
    found = kinds(path)
    in_8_bits = {name for name, kind in found.items() if kind == "int8-16"}
    assert in_8_bits == {"0.qkv", "0.down", "head"}
    assert set(found.values()) == {"int8-16", "int4-32"}


def packed_error(path: Path, exact: dict[str, Tensor]) -> float:
    """The error of a linear's weights as the kernels have them: root mean square, as a share of the
    weights'."""
    name = "model.layers.0.mlp.down_proj"
    weight = load_weights(path, read_model_config(path)).linear(name)
    match weight:
        case Int4Weight(codes, scales, zeros, group):
            held = Int4Weight(codes, stored(scales), zeros.half().float(), group).dequantized()
        case Int8Weight(codes, scales, group):
            held = Int8Weight(codes, stored(scales), group).dequantized()
        case Tensor():
            held = int8.quantize(weight).dequantized()
    difference = held - exact[f"{name}.weight"]
    return float(difference.square().mean().sqrt() / exact[f"{name}.weight"].square().mean().sqrt())


@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        *((kind, 1e-7) for kind in ("Q4_0", "Q5_0", "Q8_0")),
        *((kind, 5e-4) for kind in ("Q4_1", "Q4_K", "Q6_K")),
        *((kind, 6e-3) for kind in IN_8_BITS if kind not in ("Q5_0", "Q6_K", "Q8_0")),
    ],
)
def test_the_kernels_have_the_weights_of_the_file(
    plain: Path, tmp_path: Path, kind: str, limit: float
) -> None:
    """Exactly, but for zero points and products of scales, which are rounded to fp16, and for types
    that are quantized again."""
    path = tmp_path / "model.gguf"
    error = packed_error(path, write_gguf(plain, path, lambda name: kind))
    print(f"\n{kind}: error of the weights in the kernels' form {error:.2e}")
    assert error < limit


def test_groups_without_a_scale_hold_their_minimum() -> None:
    """Q4_1 blocks of equal weights have a scale of 0; a tiny scale is as good as none."""
    codes = torch.full((1, 96), 15, dtype=torch.uint8)
    scales, minimums = torch.tensor([[0.0, 0.0, 1e-7]]), torch.tensor([[0.5, 0.0, -2.0]])
    found = affine(codes, scales, minimums)
    assert found.dequantized().view(3, 32)[:, 0].tolist() == [0.5, 0.0, -2.0]
    assert found.zeros.abs().max() <= 1


def test_frequency_divisors_are_llama3s_scaling(tmp_path: Path) -> None:
    """llama.cpp stores them instead of the scaling's parameters."""
    spec = replace(SPEC, family="llama", rope_scaling=LLAMA3_ROPE)
    plain = make_checkpoint(tmp_path / "plain", spec)
    theirs = read_model_config(plain)
    plain_frequencies = 1 / 10_000.0 ** (torch.arange(0, 64, 2) / 64)
    divisors = []
    for frequency in plain_frequencies.tolist():
        turns = 256 * frequency / (2 * math.pi)
        smooth = min(max((turns - 1) / 3, 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / 8 + smooth))
    more = {"rope_freqs.weight": np.array(divisors, dtype=np.float32)}
    write_gguf(plain, tmp_path / "model.gguf", more=more)
    ours = read_model_config(tmp_path / "model.gguf")
    ((found_rope, found),) = rope_tables(ours).items()
    (expected,) = rope_tables(theirs).values()
    assert isinstance(found_rope.scaling, FrequencyDivisors)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


def test_a_directory_with_one_gguf_file_is_that_file(plain: Path, tmp_path: Path) -> None:
    write_gguf(plain, tmp_path / "model.gguf")
    assert weights_digest(tmp_path) == weights_digest(tmp_path / "model.gguf")
    check(find_model(str(tmp_path)).directory)
    write_gguf(plain, tmp_path / "other.gguf")
    with pytest.raises(StartupError, match=r"2 GGUF models \(model.gguf, other.gguf"):
        read_model_config(tmp_path)


def set_field(name: str, value: object) -> Callable[[Metadata], object]:
    return lambda metadata: metadata.update({name: value})


def without(name: str) -> Callable[[Metadata], object]:
    return lambda metadata: metadata.pop(name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("llama.block_count"), "llama.block_count: missing"),
        (set_field("llama.block_count", 3), "missing tensor: blk.2."),
        (set_field("llama.embedding_length", 320), "shape [384, 256], but metadata makes it"),
        (set_field("llama.rope.dimension_count", 32), "llama.rope.dimension_count: 32, but the"),
        (set_field("llama.rope.scaling.type", "su"), "llama.rope.scaling.type: 'su' is not"),
        (set_field("llama.rope.scaling.type", "yarn"), "llama.rope.scaling.factor: missing"),
        (set_field("llama.rope.scaling.type", "longrope"), "missing tensor: rope_factors_short"),
        (set_field("llama.expert_count", 8), "llama.expert_used_count: missing"),
        (set_field("llama.expert_shared_count", 1), "llama.expert_shared_count: 1: Quire does not"),
        (set_field("llama.attention.clamp_kqv", 8.0), "llama.attention.clamp_kqv: 8.0: Quire does"),
        (set_field("llama.attention.causal", False), "llama.attention.causal: false is not"),
        (set_field("llama.attention.value_length", 32), "attention.value_length: 32, but the size"),
        (set_field("llama.attention.sliding_window_pattern", [True]), "not a list of 2 of true"),
        (set_field("general.alignment", 36), "not aligned to 36 bytes, a multiple of 8"),
        (set_field("split.count", 2), "split.no: missing"),
        (set_field("tokenizer.ggml.pre", "viking"), "tokenizer.ggml.pre: 'viking' is not"),
        (set_field("tokenizer.ggml.model", "t5"), "tokenizer.ggml.model: 't5' is not supported"),
        (without("tokenizer.ggml.tokens"), "tokenizer.ggml.tokens: missing"),
        (set_field("tokenizer.ggml.tokens", ["a"] * 385), "385, but the model has 384"),
        (set_field("tokenizer.ggml.eos_token_id", 999), "999 is outside the vocabulary 384"),
        (set_field("tokenizer.chat_template", "{% if %}"), "the chat template is not valid"),
    ],
)
def test_what_cannot_be_served_is_named(
    plain: Path, tmp_path: Path, change: Callable[[Metadata], object], message: str
) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(plain, path, change=change)
    with pytest.raises(StartupError) as error:
        check(find_model(str(path)).directory)
    assert message in str(error.value)
    assert str(path) in str(error.value) or "chat template" in message


def test_other_types_and_architectures_are_refused_by_name(plain: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(plain, path, lambda name: "Q8_0")
    content = path.read_bytes()
    at = content.index(b"blk.0.ffn_up.weight") + len(b"blk.0.ffn_up.weight") + 4 + 16
    assert struct.unpack_from("<I", content, at) == (8,)
    path.write_bytes(content[:at] + struct.pack("<I", 29) + content[at + 4 :])
    with pytest.raises(StartupError, match=r"blk.0.ffn_up.weight: IQ1_M is not supported, only"):
        read_model_config(path)
    path.write_bytes(content.replace(b"llama", b"gemma"))
    with pytest.raises(StartupError, match=r"general.architecture: 'gemma' is not supported"):
        read_model_config(path)


def test_names_that_occur_twice_are_refused(plain: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(plain, path)
    content = path.read_bytes()
    path.write_bytes(content.replace(b"blk.0.attn_q.w", b"blk.0.attn_k.w"))
    with pytest.raises(StartupError, match=r"blk.0.attn_k.weight occurs twice"):
        read_model_config(path)


def test_array_of_arrays_is_refused(tmp_path: Path) -> None:
    """However deep: reading it would end in a RecursionError."""
    path = tmp_path / "model.gguf"
    nested = struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 0, 0)
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ1sI", 3, 0, 1, 1, b"a", 9) + nested)
    with pytest.raises(StartupError, match="an array of arrays"):
        read_model_config(path)


@pytest.mark.parametrize("size", [0, 3, 20, 3000, -1])
def test_a_truncated_file_is_named(plain: Path, tmp_path: Path, size: int) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(plain, path)
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(StartupError, match=f"{path}: not a readable GGUF file: "):
        read_model_config(path)


def test_every_byte_of_the_header_may_be_wrong(plain: Path, tmp_path: Path) -> None:
    """A broken file raises StartupError or is read; no other error is raised."""
    path = tmp_path / "model.gguf"
    write_gguf(plain, path, lambda name: "Q4_0")
    assert number_refused(path, 1500) > 50


def test_quantized_files_are_not_quantized_again(plain: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(plain, path, lambda name: "Q4_0")
    with pytest.raises(StartupError, match=r"already quantized \(int4-32\)"):
        load_model(path, torch.bfloat16, kvops.backend("cpu"), quantize="int8")
