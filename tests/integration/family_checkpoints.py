"""Checkpoints of every family with random weights, made by transformers from its own configs."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

_EMBEDDING_STD = 0.03  # far below what sublayers add, so that greedy decoding wanders
_LOGIT_STD = 2.0


@dataclass(frozen=True, slots=True)
class Case:
    """`config`: fields of transformers' config of this `model_type`, beside those of `_SMALL`.
    `context`: what `--max-model-len` would be. `lengths`: of the prompts that are compared."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    context: int | None = None
    lengths: tuple[int, ...] = (1, 17, 100)


_SMALL: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 100,
    "vocab_size": 389,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **fields}}


_LONG = _rope(
    "longrope",
    short_factor=[1.0 + i / 16 for i in range(8)],
    long_factor=[1.0 + i for i in range(8)],
    original_max_position_embeddings=32,
)

CASES = {
    "rope linear": Case("qwen3", _rope("linear", factor=3.0)),
    "rope dynamic": Case("llama", _rope("dynamic", factor=2.0) | {"max_position_embeddings": 106}),
    "rope yarn": Case("qwen3", _rope("yarn", factor=4.0, original_max_position_embeddings=32)),
    "rope yarn, all fields": Case(
        "llama",
        _rope(
            "yarn",
            factor=8.0,
            original_max_position_embeddings=32,
            beta_fast=16.0,
            beta_slow=2.0,
            mscale=1.5,
            mscale_all_dim=0.5,
            truncate=False,
        ),
    ),
    "rope longrope, short": Case("llama", _LONG, context=32, lengths=(1, 17, 26)),
    "rope longrope, long": Case("llama", _LONG, lengths=(33, 100)),
    "rope llama3": Case(
        "mistral",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
}


def make(directory: Path, case: Case, seed: int = 0) -> Path:
    """Write the checkpoint of a case; the same arguments give the same weights."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
        AutoConfig.for_model(case.model_type, **{**_SMALL, **case.config}), dtype=torch.float32
    )
    _draw(model)
    model.save_pretrained(directory)
    return directory


@torch.no_grad()
def _draw(model: PreTrainedModel) -> None:
    """Draw all weights, those of norms and biases too, which transformers sets to 0 or 1."""
    hidden = model.config.hidden_size
    head_std = _EMBEDDING_STD if model.config.tie_word_embeddings else hidden**-0.5
    for name, weight in model.named_parameters():
        if "embed_tokens" in name or "lm_head" in name:
            weight.normal_(0.0, _EMBEDDING_STD if "embed_tokens" in name else head_std)
        elif weight.dim() > 1:
            weight.normal_(0.0, 1 / math.sqrt(weight.shape[1]))
        elif name.endswith(".bias"):
            weight.normal_(0.0, 0.2)
        else:
            gain = _LOGIT_STD / head_std / math.sqrt(hidden) if name == "model.norm.weight" else 1.0
            usual = float(weight.mean())  # 0 where the norm adds 1 to its weight
            weight.normal_(gain + usual - 1, 0.2 * gain)
