"""The families of models: one row for each architecture that Quire serves, which says how its
decoder differs from Llama's.

A family is a row, not a class. `ModelConfig` reads a checkpoint's config.json by its row, and the
decoders read the row and the config. An architecture whose arithmetic the fields cannot say needs a
new field, with an implementation in every decoder or a refusal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

CLASSIFIER = "ForSequenceClassification"
"""The end of the architecture of a decoder with a classification head. It has the row of the same
decoder `ForCausalLM`."""

Activation = Literal["silu", "gelu_pytorch_tanh"]
"""As transformers names them."""

Biases = Literal["none", "as configured", "qkv", "qkv as configured"]
"""Which linears of attention have a bias: none; all four if `attention_bias` is true; the linears
of queries, keys and values, always, or if it is true."""

QKNorm = Literal["none", "per head", "all heads"]
"""Norms of queries and of keys: none; of each head; of all heads of a token together."""

Windows = Literal[
    "none",
    "all layers",
    "all layers by flag",
    "upper layers",
    "every second",
    "but every nth",
    "no rope",
]
"""Which layers have a sliding window where `layer_types` is absent: none; all, if `sliding_window`
is a number; all, if `use_sliding_window` is true; those from `max_window_layers` on, if it is; the
first and every second one; all but each `sliding_window_pattern`-th; those without rotation, if
`use_sliding_window` is true."""

Ropes = Literal["one", "some layers", "by layer type"]
"""The rotations of the layers: one for all; one, and none in the layers that `no_rope_layers`
names; one for layers with a sliding window and one for those without."""

Number = Literal[
    "attention_multiplier",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_multiplier",
    "residual_multiplier",
    "logits_scaling",
]


@dataclass(frozen=True, slots=True)
class Norms:
    """The names of a layer's norms in the checkpoint: of the inputs of attention and of the MLP,
    and of their outputs before these are added to the residual stream. None if there is none."""

    attention_in: str | None = "input_layernorm"
    attention_out: str | None = None
    mlp_in: str | None = "post_attention_layernorm"
    mlp_out: str | None = None


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """The names of a layer's experts in a checkpoint."""

    place: str
    """The place of router and experts in a layer; the next four are the names of their linears."""
    router: str
    gate: str
    up: str
    down: str
    numbers: tuple[str, ...]
    """The fields of config.json with the number of experts; one of them suffices."""
    width: str
    """The field of config.json with the inner dimension of an expert."""
    number: int | None = None
    """The number of experts if all of `numbers` are absent."""
    normalizes: bool | None = None
    """Whether the weights of a token's experts are divided by their sum; None leaves that to
    `norm_topk_prob`."""
    some_layers: bool = False
    """Whether `mlp_only_layers` and `decoder_sparse_step` tell which layers have experts."""
    biases: bool = False
    """Whether router and experts have biases."""
    stacked: bool = False
    """Whether each tensor has all experts of a layer
    (`services.engine.weights.stacked_experts`)."""
    swiglu: bool = False
    """Whether the gate uses `swiglu_alpha` and `swiglu_limit`."""


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture's decoder differs from Llama's, which is the default of each field."""

    norms: Norms = Norms()
    """The norms of a layer, and their names."""
    norm_offset: float = 0.0
    """The number that is added to the weights of all norms."""
    qk_norm: QKNorm = "none"
    """The norm of queries and keys before their rotation."""
    biases: Biases = "as configured"
    mlp_bias: bool = False
    """Whether the field `mlp_bias` has a meaning."""
    activation: Activation = "silu"
    activation_name: str = "hidden_act"
    """The field with the activation of the MLP's gate."""
    windows: Windows = "none"
    """Which layers have a sliding window."""
    ropes: Ropes = "one"
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    """The scaling of a config.json without any."""
    partial_rotary: bool = False
    """Whether `partial_rotary_factor`, the part of a head that is rotated, has a meaning."""
    interleaved: bool = False
    """Whether a rotation's pairs are neighbours in the checkpoint."""
    scaled_embedding: bool = False
    """Whether embeddings are multiplied by the root of the hidden size."""
    numbers: tuple[Number, ...] = ()
    """The fields that scale or bound values and have a meaning."""
    fused: tuple[str, ...] = ()
    """The linears of the checkpoint that are several of Llama's, `qkv_proj` or `gate_up_proj`."""
    experts: ExpertNames | None = None
    """The names of the experts; None if no layer has any."""
    sinks: bool = False
    """Whether attention has a sink for each head."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """The values of fields that a config.json may leave out, if `ModelConfig` reads other ones."""
    ignored: tuple[str, ...] = ()
    """The fields that transformers ignores for this architecture, and so does Quire."""
    neutral: Mapping[str, Any] = field(default_factory=dict)
    """The fields of published checkpoints that say nothing with this value."""


_GEMMA_NORMS = Norms(
    attention_out="post_attention_layernorm",
    mlp_in="pre_feedforward_layernorm",
    mlp_out="post_feedforward_layernorm",
)
_GEMMA_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}

FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(mlp_bias=True, ignored=("sliding_window", "max_window_layers")),
    "MistralForCausalLM": Family(
        biases="none",
        windows="all layers",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        ignored=("attention_bias", "use_sliding_window", "max_window_layers"),
    ),
    "Qwen2ForCausalLM": Family(
        biases="qkv",
        windows="upper layers",
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        ignored=("attention_bias",),
    ),
    "Qwen3ForCausalLM": Family(
        qk_norm="per head",
        windows="upper layers",
        defaults={
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "head_dim": 128,
        },
    ),
    "MixtralForCausalLM": Family(
        biases="none",
        windows="all layers",
        experts=ExpertNames(
            "block_sparse_moe",
            "gate",
            "w1",
            "w3",
            "w2",
            numbers=("num_local_experts",),
            width="intermediate_size",
            normalizes=True,
        ),
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
        ignored=("attention_bias", "use_sliding_window", "max_window_layers"),
    ),
    "Qwen3MoeForCausalLM": Family(
        qk_norm="per head",
        windows="all layers by flag",
        experts=ExpertNames(
            "mlp",
            "gate",
            "gate_proj",
            "up_proj",
            "down_proj",
            numbers=("num_experts", "num_local_experts"),
            number=128,
            width="moe_intermediate_size",
            some_layers=True,
        ),
        defaults={
            "num_key_value_heads": 4,
            "sliding_window": 4096,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        ignored=("max_window_layers",),
        neutral={"use_qk_norm": True},  # Qwen3-Coder
    ),
    "GptOssForCausalLM": Family(
        windows="every second",
        experts=ExpertNames(
            "mlp",
            "router",
            "gate_proj",
            "up_proj",
            "down_proj",
            numbers=("num_local_experts",),
            width="intermediate_size",
            normalizes=True,
            biases=True,
            stacked=True,
            swiglu=True,
        ),
        sinks=True,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        defaults={
            "num_key_value_heads": 8,
            "attention_bias": True,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "sliding_window": 128,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        ignored=("experts_per_token", "initial_context_length", "use_sliding_window"),
    ),
    "SmolLM3ForCausalLM": Family(
        mlp_bias=True,
        windows="no rope",
        ropes="some layers",
        defaults={
            "num_key_value_heads": 4,
            "rope_theta": 2_000_000.0,
            "tie_word_embeddings": True,
        },
        ignored=("max_window_layers",),
    ),
    "Olmo2ForCausalLM": Family(
        norms=Norms(
            attention_in=None,
            attention_out="post_attention_layernorm",
            mlp_in=None,
            mlp_out="post_feedforward_layernorm",
        ),
        qk_norm="all heads",
        defaults={"rms_norm_eps": 1e-5},
    ),
    "GraniteForCausalLM": Family(
        mlp_bias=True,
        numbers=(
            "attention_multiplier",
            "embedding_multiplier",
            "residual_multiplier",
            "logits_scaling",
        ),
        defaults={"attention_multiplier": 1.0},
    ),
    "Phi3ForCausalLM": Family(
        biases="none",
        windows="all layers",
        partial_rotary=True,
        fused=("qkv_proj", "gate_up_proj"),
        defaults={"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096},
        neutral={"full_attn_mod": 1, "interpolate_factor": 1},  # Phi-4-mini
    ),
    "Glm4ForCausalLM": Family(
        norms=Norms(attention_out="post_self_attn_layernorm", mlp_out="post_mlp_layernorm"),
        biases="qkv as configured",
        partial_rotary=True,
        interleaved=True,
        fused=("gate_up_proj",),
        defaults={
            "num_key_value_heads": 2,
            "rms_norm_eps": 1.5625e-7,
            "head_dim": 128,
            "attention_bias": True,
            "partial_rotary_factor": 0.5,
        },
    ),
    "Gemma2ForCausalLM": Family(
        norms=_GEMMA_NORMS,
        norm_offset=1.0,
        activation="gelu_pytorch_tanh",
        activation_name="hidden_activation",
        windows="every second",
        scaled_embedding=True,
        numbers=("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
        defaults=_GEMMA_DEFAULTS
        | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
        ignored=("hidden_act",),
    ),
    "Gemma3ForCausalLM": Family(
        norms=_GEMMA_NORMS,
        norm_offset=1.0,
        qk_norm="per head",
        activation="gelu_pytorch_tanh",
        activation_name="hidden_activation",
        windows="but every nth",
        ropes="by layer type",
        scaled_embedding=True,
        numbers=("query_pre_attn_scalar", "final_logit_softcapping"),
        defaults=_GEMMA_DEFAULTS
        | {
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
        },
        ignored=("hidden_act",),
    ),
}
