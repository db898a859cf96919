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
    """A checkpoint of a family. `config`: fields of transformers' config of this `model_type`,
    beside those of `_SMALL`. `context`: the value of `--max-model-len`. `lengths`: of the compared
    prompts."""

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
    "eos_token_id": 3,
}


def _rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **fields}}


_SHORT = {"original_max_position_embeddings": 32}
_LONG = _rope(
    "longrope",
    short_factor=[1.0 + i / 16 for i in range(8)],
    long_factor=[1.0 + i for i in range(8)],
    **_SHORT,
)
_PART = {"short_factor": [1.0, 1.5, 2.0], "long_factor": [1.0, 4.0, 9.0]}
_YARN = {"beta_fast": 16.0, "beta_slow": 2.0, "mscale": 1.5, "mscale_all_dim": 0.5}
_LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_UNTIED = {"tie_word_embeddings": False}
_BIASED = {"attention_bias": True}
_BIASES = _BIASED | {"mlp_bias": True}
_WINDOW = {"use_sliding_window": True, "sliding_window": 20}
_GRANITE = {"attention_multiplier": 0.2, "residual_multiplier": 0.4, "logits_scaling": 3.0}
_GRANITE |= {"embedding_multiplier": 6.0}
_QWEN3_MOE = {"num_experts": 130, "num_experts_per_tok": 4, "moe_intermediate_size": 20}

CASES = {
    "rope linear": Case("qwen3", _rope("linear", factor=3.0)),
    "rope dynamic": Case("llama", _rope("dynamic", factor=2.0) | {"max_position_embeddings": 106}),
    "rope yarn": Case("qwen3", _rope("yarn", factor=4.0, **_SHORT)),
    "rope yarn, all fields": Case(
        "llama", _rope("yarn", factor=8.0, truncate=False, **_SHORT, **_YARN)
    ),
    "rope longrope, short": Case("llama", _LONG, context=32, lengths=(1, 17, 26)),
    "rope longrope, long": Case("llama", _LONG, lengths=(33, 100)),
    "qwen2": Case("qwen2"),
    "llama, all biases": Case("llama", _BIASES | _UNTIED),
    "smollm3": Case("smollm3", {"num_hidden_layers": 5}),
    "smollm3, windows and biases": Case(
        "smollm3",
        _WINDOW | _BIASES | _UNTIED | {"no_rope_layers": [0, 1, 1], "vocab_size": 401},
    ),
    "olmo2": Case("olmo2", {"head_dim": 12, "num_key_value_heads": 4}),
    "olmo2, untied": Case("olmo2", _UNTIED | _BIASED),
    "granite": Case("granite", _GRANITE | {"num_key_value_heads": 1}),
    "granite, untied": Case("granite", _GRANITE | _UNTIED | _BIASES),
    "phi3": Case("phi3", {"intermediate_size": 90, "sliding_window": 30}),
    "phi3, partial longrope": Case(
        "phi3",
        _rope("longrope", partial_rotary_factor=0.4, **_PART) | _SHORT | _UNTIED,
        lengths=(33, 100),
    ),
    "glm4": Case("glm4", {"head_dim": 24, "vocab_size": 521}),
    "glm4, whole heads": Case(
        "glm4", _rope("default", partial_rotary_factor=1.0) | _UNTIED | {"attention_bias": False}
    ),
    "gemma2": Case("gemma2", {"sliding_window": 20, "query_pre_attn_scalar": 20}),
    "gemma2, small caps": Case(
        "gemma2",
        {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0, "num_hidden_layers": 4}
        | {"head_dim": 10, "sliding_window": 9, **_UNTIED, **_BIASED},
    ),
    "gemma3": Case("gemma3_text", {"sliding_window": 20, "num_hidden_layers": 7}),
    "gemma3, linear rope": Case(
        "gemma3_text",
        {
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        }
        | {"sliding_window": 33, "final_logit_softcapping": 2.0, **_UNTIED},
    ),
    "mixtral": Case("mixtral", {"num_local_experts": 5, "intermediate_size": 36}),
    "mixtral, window": Case(
        "mixtral",
        {"num_local_experts": 8, "num_experts_per_tok": 3, "sliding_window": 20}
        | {"vocab_size": 401, **_UNTIED},
    ),
    "qwen3 moe": Case("qwen3_moe", _QWEN3_MOE | {"norm_topk_prob": True}),
    "qwen3 moe, some layers": Case(
        "qwen3_moe",
        _QWEN3_MOE
        | {"num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
        | {"vocab_size": 521, **_BIASED, **_UNTIED},
    ),
    "qwen3 moe, window": Case(
        "qwen3_moe", _QWEN3_MOE | _WINDOW | {"num_experts": 9, "head_dim": 24}
    ),
    "gpt-oss": Case("gpt_oss", {"num_local_experts": 6, "sliding_window": 20}),
    "gpt-oss, one kind of layer": Case(
        "gpt_oss",
        {"num_local_experts": 33, "num_experts_per_tok": 3, "intermediate_size": 36}
        | {"layer_types": ["full_attention"] * 3, "attention_bias": False, "swiglu_limit": 1.0}
        | {"vocab_size": 401, **_rope("default"), **_UNTIED},
    ),
    "rope llama3": Case("mistral", _rope("llama3", **_LLAMA3, **_SHORT)),
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
        elif weight.dim() > 1 and not name.endswith("bias"):
            weight.normal_(0.0, 1 / math.sqrt(weight.shape[1]))
        elif name.endswith(("bias", "sinks")):
            weight.normal_(0.0, 0.2 if name.endswith("bias") else 2.0)
        else:
            gain = _LOGIT_STD / head_std / math.sqrt(hidden) if name == "model.norm.weight" else 1.0
            usual = float(weight.mean())  # 0 where the norm adds 1 to its weight
            weight.normal_(gain + usual - 1, 0.2 * gain)
