"""The families of models: one row for each architecture that Quire serves, which says how its
decoder differs from Llama's.

A family is a row, not a class. `ModelConfig` reads a checkpoint's config.json by its row, and the
decoders read the row and the config. An architecture whose arithmetic the fields cannot say needs a
new field, with an implementation in every decoder or a refusal.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Activation = Literal["silu"]

Biases = Literal["none", "as configured", "qkv"]
"""Which linears of attention have a bias: none; all four if `attention_bias` is true; those of
queries, keys and values, always."""

QKNorm = Literal["none", "per head"]

Windows = Literal["none", "all layers", "upper layers"]
"""Which layers have a sliding window where `layer_types` is absent: none; all, if `sliding_window`
is a number; those from `max_window_layers` on, if `use_sliding_window` is true."""


@dataclass(frozen=True, slots=True)
class Norms:
    """The names of a layer's norms in the checkpoint: of the inputs of attention and of the MLP."""

    attention_in: str = "input_layernorm"
    mlp_in: str = "post_attention_layernorm"


@dataclass(frozen=True, slots=True)
class Family:
    """How an architecture's decoder differs from Llama's, which is the default of each field.

    `norms`: which norms a layer has, and their names. `qk_norm`: how queries and keys are
    normalized before their rotation. `biases`: of attention. `mlp_bias`: whether the field
    `mlp_bias` has a meaning. `activation`: of the MLP's gate. `windows`: which layers have a
    sliding window.

    `defaults`: the value of each field that a config.json may leave out, where transformers has
    another one than `ModelConfig` reads for all. `ignored`: fields that transformers ignores for
    this architecture, and so does Quire.
    """

    norms: Norms = Norms()
    qk_norm: QKNorm = "none"
    biases: Biases = "as configured"
    mlp_bias: bool = False
    activation: Activation = "silu"
    windows: Windows = "none"
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(mlp_bias=True, ignored=("sliding_window", "max_window_layers")),
    "MistralForCausalLM": Family(
        biases="none",
        windows="all layers",
        defaults={"sliding_window": 4096},
        ignored=("attention_bias", "use_sliding_window", "max_window_layers"),
    ),
    "Qwen2ForCausalLM": Family(
        biases="qkv",
        windows="upper layers",
        defaults={"sliding_window": 4096, "max_window_layers": 28},
        ignored=("attention_bias",),
    ),
    "Qwen3ForCausalLM": Family(
        qk_norm="per head",
        windows="upper layers",
        defaults={"sliding_window": 4096, "max_window_layers": 28, "head_dim": 128},
    ),
}
