"""The cost of rounding, on random weights: bf16 compared with fp64, as transformers' own, and KV in
int8 compared with fp32."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench.make_checkpoint import CheckpointSpec, make_checkpoint
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


def ours(directory: Path, dtype: torch.dtype, *, kv_in_int8: bool = False) -> RecordingRunner:
    return RecordingRunner(directory, BLOCK_SIZE, 128, dtype=dtype, kv_in_int8=kv_in_int8)


def error(found: list[Tensor], exact: list[Tensor]) -> float:
    """Root mean square over all logits, as a share of their spread."""
    difference = torch.cat(found).double() - torch.cat(exact).double()
    return float(difference.square().mean().sqrt() / torch.cat(exact).double().std())


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
