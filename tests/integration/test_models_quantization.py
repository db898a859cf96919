"""The cost of rounding: bf16 compared with fp64, as transformers' own, and int8 and int4
compared with fp32.

`pytest -s` prints the figures of docs/benchmarks/quantization.md.
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from bench.make_checkpoint import CheckpointSpec, make_checkpoint
from kvops import int4
from services.common.checkpoint.quantization import Quantization
from services.engine.batch import Row, Scoring

from .models_oracle import GREEDY, LLAMA3_ROPE, RecordingRunner, random_prompt

BLOCK_SIZE = 16
PROMPTS = [random_prompt(length, seed=i) for i, length in enumerate((1, 2, 17, 60, 150, 300))]
SHAPES = {
    "qwen3": CheckpointSpec(num_layers=4, hidden_size=256, intermediate_size=768, head_dim=32),
    "qwen3-deep": CheckpointSpec(num_layers=12, hidden_size=128, intermediate_size=384),
    "qwen2": CheckpointSpec("qwen2", num_layers=4, hidden_size=192, num_heads=6, tied=False),
    "llama": CheckpointSpec("llama", hidden_size=512, num_kv_heads=1, intermediate_size=1024),
    "llama3": CheckpointSpec(
        "llama", num_layers=6, hidden_size=192, tied=False, rope_scaling=LLAMA3_ROPE
    ),
    "mistral": CheckpointSpec("mistral", num_layers=4, hidden_size=256, sliding_window=50),
}


def all_logits(recording: RecordingRunner, token_ids: Sequence[int]) -> Tensor:
    """fp32 [tokens, vocab_size] after every token, in one pass."""
    num_blocks = -(-len(token_ids) // BLOCK_SIZE)
    all_but_last = Scoring([0] * (len(token_ids) - 1), 0)
    row = Row(token_ids, 0, range(num_blocks), draws=(GREEDY,), scoring=all_but_last)
    return recording.logits([row])


def ours(
    directory: Path,
    dtype: torch.dtype,
    quantize: Quantization | None = None,
    *,
    kv_in_int8: bool = False,
) -> RecordingRunner:
    return RecordingRunner(
        directory, BLOCK_SIZE, 128, dtype=dtype, quantize=quantize, kv_in_int8=kv_in_int8
    )


@torch.inference_mode()
def theirs(directory: Path, dtype: torch.dtype) -> list[Tensor]:
    """The logits of transformers for every prompt."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, local_files_only=True)
    return [model(torch.tensor([prompt])).logits[0] for prompt in PROMPTS]


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """Root mean square over all logits, as a share of their spread."""
    difference = torch.cat(found).double() - torch.cat(exact).double()
    return float(difference.square().mean().sqrt() / torch.cat(exact).double().std())


@pytest.mark.parametrize("name", SHAPES)
def test_bf16_is_at_least_as_near_to_fp64_as_transformers(tmp_path: Path, name: str) -> None:
    """Of the same bf16 weights."""
    directory = make_checkpoint(tmp_path, replace(SHAPES[name], dtype="bfloat16"))
    exact = theirs(directory, torch.float64)
    recording = ours(directory, torch.bfloat16)
    our_error = error([all_logits(recording, prompt) for prompt in PROMPTS], exact)
    their_error = error(theirs(directory, torch.bfloat16), exact)
    print(f"\n{name}: bf16 error {our_error:.4f}, transformers' {their_error:.4f}")
    assert our_error <= their_error


@pytest.mark.parametrize("name", SHAPES)
def test_int8_logits_are_near_those_in_fp32(tmp_path: Path, name: str) -> None:
    """Random weights have no outliers, but also no redundancy: an error goes through all layers."""
    directory = make_checkpoint(tmp_path, SHAPES[name])
    exact, rounded = ours(directory, torch.float32), ours(directory, torch.bfloat16, "int8")
    int8_error = error(
        [all_logits(rounded, prompt) for prompt in PROMPTS],
        [all_logits(exact, prompt) for prompt in PROMPTS],
    )
    print(f"\n{name}: int8 error {int8_error:.4f}")
    assert 0.001 < int8_error < 0.07


@pytest.mark.parametrize("name", SHAPES)
def test_logits_with_int8_kv_are_near_those_with_fp32(tmp_path: Path, name: str) -> None:
    directory = make_checkpoint(tmp_path, SHAPES[name])
    exact = ours(directory, torch.float32)
    rounded = ours(directory, torch.float32, kv_in_int8=True)
    kv_error = error(
        [all_logits(rounded, prompt) for prompt in PROMPTS],
        [all_logits(exact, prompt) for prompt in PROMPTS],
    )
    print(f"\n{name}: int8 KV error {kv_error:.4f}")
    assert 0.0005 < kv_error < 0.02


def dequantized(directory: Path, copy: Path, group: int) -> Path:
    """A copy of the checkpoint whose linears have the values of their four-bit weights."""
    shutil.copytree(directory, copy)
    file = copy / "model.safetensors"
    tensors = load_file(file)
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight"):
            tensors[name] = int4.quantize(tensor, group).dequantized().contiguous()
    save_file(tensors, file, {"format": "pt"})
    return copy


@pytest.mark.parametrize(
    ("name", "quantize", "group"),
    [
        ("qwen3", "int4-32", 32),
        ("qwen3", "int4-128", 128),
        *((name, "int4", 64) for name in SHAPES),
    ],
)
def test_int4_logits_are_as_near_to_the_dequantized_weights_as_int8_is(
    tmp_path: Path, name: str, quantize: Quantization, group: int
) -> None:
    """Beside the weights, only the activations and the head are rounded, to 8 bits. The rounding of
    the weights is an error of about 8 % of a weight, which goes through all layers."""
    directory = make_checkpoint(tmp_path, SHAPES[name])
    rounded, exact = ours(directory, torch.bfloat16, quantize), ours(directory, torch.float32)
    same_weights = ours(dequantized(directory, tmp_path / "dequantized", group), torch.float32)
    found, of_fp32, of_same_weights = (
        [all_logits(recording, prompt) for prompt in PROMPTS]
        for recording in (rounded, exact, same_weights)
    )
    of_activations, whole = error(found, of_same_weights), error(found, of_fp32)
    print(f"\n{name}: {quantize} error {whole:.4f}, with the same weights {of_activations:.4f}")
    assert 0.001 < of_activations < 0.07
    assert of_activations < whole < 0.6
