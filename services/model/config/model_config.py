"""The configuration of a model, and how config.json and generation_config.json make one.

The gateway reads them too, so this module does not import PyTorch.
"""

from dataclasses import dataclass, replace
from typing import Any

from services.model.config.expert_config import ExpertConfig, read_experts
from services.model.config.families import CLASSIFIER, FAMILIES, Family, Number
from services.model.config.json_fields import JsonFields
from services.model.config.neutral_fields import check_all_read
from services.model.config.quantization import StoredQuantization, stored_quantization
from services.model.config.rope_config import (
    LongScaling,
    RopeConfig,
    extended_context,
    read_ropes,
    rotated_layers,
)
from services.runtime.errors import StartupError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The checkpoint's default sampling parameters; None if it does not set one."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    """Limit for the generated tokens of every request, as in vLLM."""

    @classmethod
    def from_fields(cls, fields: JsonFields) -> "GenerationDefaults":
        for name in ("top_p", "min_p"):
            if fields.has(name) and fields.number(name, positive=False) > 1:
                raise fields.wrong(name, f"{fields.values[name]!r} is above 1")
        return cls(
            temperature=_optional_number(fields, "temperature"),
            top_k=_top_k(fields),
            top_p=_optional_number(fields, "top_p", positive=True),
            min_p=_optional_number(fields, "min_p"),
            repetition_penalty=_optional_number(fields, "repetition_penalty", positive=True),
            max_new_tokens=(
                fields.integer("max_new_tokens") if fields.has("max_new_tokens") else None
            ),
        )


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The configuration of a decoder-only model of one of the architectures in `FAMILIES`."""

    architecture: str
    family: Family
    """The architecture's row in `FAMILIES`. Fingerprints include it with the configuration."""
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    ropes: tuple[RopeConfig | None, ...]
    """The rotation of each layer; None rotates nothing."""
    attention_scale: float
    """The factor of the products of queries and keys."""
    tied_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]
    """The number of positions that a query sees in each layer, its own included; None is all."""
    dtype: str
    """The dtype of the weights that are not quantized, one of `DTYPES`."""
    eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults
    quantization: StoredQuantization | None = None
    """None if no weights are quantized."""
    experts: ExpertConfig | None = None
    attention_cap: float | None = None
    """The soft cap of scores, cap * tanh(x / cap), if they have one."""
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    """The factor of a sublayer's output."""
    logit_scale: float = 1.0
    logit_cap: float | None = None
    """The soft cap of logits, if they have one."""

    @property
    def is_cross_encoder(self) -> bool:
        """Whether the model has a head that scores a pair of texts, and none that draws tokens."""
        return self.architecture.endswith(CLASSIFIER)

    def for_context(self, context: int | None) -> "ModelConfig":
        """The configuration of a worker whose requests have at most `context` positions; None is
        the model's own limit. It differs only if the rope's scaling depends on the context: then
        all positions are rotated alike, whatever the length of a request, so that blocks of a
        prefix can be shared.

        Raises StartupError if the context is longer than the model's.
        """
        if context is not None and context > self.max_position_embeddings:
            raise StartupError(
                f"max_model_len {context} is beyond the model's context of "
                f"{self.max_position_embeddings}"
            )
        scalings = [rope.scaling for rope in self.ropes if rope is not None]
        if context is None or not any(isinstance(scaling, LongScaling) for scaling in scalings):
            return self
        return replace(self, max_position_embeddings=context)


def model_config(config: JsonFields, generation: JsonFields) -> ModelConfig:
    """The configuration that config.json and generation_config.json describe. Raises
    StartupError."""
    architecture = _architecture(config)
    family = FAMILIES[architecture.replace(CLASSIFIER, "ForCausalLM")]
    config = config.with_defaults(family.defaults)
    if (act := config.text(family.activation_name, "silu")) != family.activation:
        known = f"{act!r} is not supported, only {family.activation!r}"
        raise config.wrong(family.activation_name, known)
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    vocab_size = config.integer("vocab_size")
    num_layers = config.integer("num_hidden_layers")
    head_dim = _head_dim(config, hidden_size, num_heads)
    windows = _windows(config, family, num_layers)
    configured = "as configured" in family.biases and config.boolean("attention_bias", False)
    found = ModelConfig(
        architecture=architecture,
        family=family,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, num_heads),
        head_dim=head_dim,
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=vocab_size,
        max_position_embeddings=extended_context(config, family),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        ropes=read_ropes(config, family, head_dim, windows),
        tied_embeddings=config.boolean("tie_word_embeddings", default=False)
        or architecture.endswith(CLASSIFIER),  # it has no other matrix over the vocabulary
        qkv_bias=configured or family.biases == "qkv",
        o_bias=configured and family.biases == "as configured",
        mlp_bias=family.mlp_bias and config.boolean("mlp_bias", default=False),
        windows=windows,
        dtype=_dtype(config),
        eos_token_ids=_eos_token_ids(config, generation, vocab_size),
        generation=GenerationDefaults.from_fields(generation),
        quantization=stored_quantization(config),
        experts=read_experts(config, family, num_layers),
        **_numbers(config, family, hidden_size, head_dim),
    )
    stored, names = found.quantization, family.experts
    if stored is not None and stored.format == "mxfp4" and not (names and names.stacked):
        raise config.wrong("quantization_config", "mxfp4 is read for the experts of gpt-oss only")
    neutral = [name for name, value in family.neutral.items() if config.values.get(name) == value]
    check_all_read(config, [*family.ignored, *neutral])
    return found


def _numbers(config: JsonFields, family: Family, hidden_size: int, head_dim: int) -> dict[str, Any]:
    """The fields of a ModelConfig that scale and bound values."""

    def number(name: Number) -> float | None:
        return config.number(name) if name in family.numbers and config.has(name) else None

    scalar = number("query_pre_attn_scalar") or head_dim
    return {
        "attention_scale": number("attention_multiplier") or scalar**-0.5,
        "attention_cap": number("attn_logit_softcapping"),
        "embedding_scale": hidden_size**0.5
        if family.scaled_embedding
        else number("embedding_multiplier") or 1.0,
        "residual_scale": number("residual_multiplier") or 1.0,
        "logit_scale": 1.0 / (number("logits_scaling") or 1.0),
        "logit_cap": number("final_logit_softcapping"),
    }


def _architecture(config: JsonFields) -> str:
    known = ", ".join(FAMILIES)
    names = config.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise config.wrong("architectures", f"{names!r} is not a list of one of {known}")
    if str(names[0]).replace(CLASSIFIER, "ForCausalLM") not in FAMILIES:
        raise config.wrong("architectures", f"{names[0]!r} is not supported; these are: {known}")
    return str(names[0])


def _num_kv_heads(config: JsonFields, num_heads: int) -> int:
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise config.wrong(
            "num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    return num_kv_heads


def _head_dim(config: JsonFields, hidden_size: int, num_heads: int) -> int:
    if not config.has("head_dim") and hidden_size % num_heads:
        raise config.wrong(
            "hidden_size", f"{hidden_size} is not a multiple of num_attention_heads {num_heads}"
        )
    head_dim = config.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise config.wrong("head_dim", f"{head_dim} is odd; rotary embeddings need pairs")
    return head_dim


def _windows(config: JsonFields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    """The attention window of each layer: those that `layer_types` names, else as the family
    has it."""
    window = _window(config, family)
    slides = _sliding(config, family, num_layers)
    windows = tuple(window if slide else None for slide in slides)
    if not config.has("layer_types"):
        return windows
    kinds = config.value("layer_types")
    if not isinstance(kinds, list) or len(kinds) != num_layers:
        raise config.wrong("layer_types", f"{kinds!r} is not a list of {num_layers}")
    known = ("full_attention", "sliding_attention") if window else ("full_attention",)
    for kind in kinds:
        if kind not in known:
            raise config.wrong("layer_types", f"{kind!r} is none of {', '.join(known)}")
    by_type = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    # transformers ignores the layer_types of these families, other engines do not; so both must
    # agree.
    if family.windows in ("all layers", "all layers by flag") and by_type != windows:
        raise config.wrong("layer_types", f"all layers of this architecture are {known[-1]}")
    return by_type


def _sliding(config: JsonFields, family: Family, num_layers: int) -> list[bool]:
    """The layers that have a window, if there is one and `layer_types` is absent."""
    layers = range(num_layers)
    match family.windows:
        case "upper layers":
            begin = config.integer("max_window_layers", least=0)
            return [layer >= begin for layer in layers]
        case "every second":
            return [layer % 2 == 0 for layer in layers]
        case "but every nth":
            nth = config.integer("sliding_window_pattern")
            return [(layer + 1) % nth != 0 for layer in layers]
        case "no rope":
            return [not has for has in rotated_layers(config, family, num_layers)]
        case _:
            return [True] * num_layers


def _window(config: JsonFields, family: Family) -> int | None:
    """The window of layers with a sliding window; None if no layer has one. An absent field means
    the family's default, as in transformers, but null means no window."""
    by_flag = family.windows in ("none", "all layers by flag", "upper layers", "no rope")
    uses = not by_flag or config.boolean("use_sliding_window", default=False)
    if family.windows == "none":
        if uses:
            raise config.wrong("use_sliding_window", "this architecture has no sliding window")
        return None
    window = config.integer("sliding_window") if config.has("sliding_window") else None
    return window if uses else None


def _dtype(config: JsonFields) -> str:
    name = "dtype" if config.has("dtype") else "torch_dtype"  # of transformers 5, and before
    dtype = config.text(name, "float32")
    if dtype not in DTYPES:
        raise config.wrong(name, f"{dtype!r} is not supported, only {', '.join(DTYPES)}")
    return dtype


def _eos_token_ids(config: JsonFields, generation: JsonFields, vocab_size: int) -> tuple[int, ...]:
    owner = generation if generation.has("eos_token_id") else config
    value = owner.value("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise owner.wrong("eos_token_id", f"{value!r} is neither a token id nor a list of them")
        if not 0 <= token_id < vocab_size:
            raise owner.wrong("eos_token_id", f"{token_id} is outside the vocabulary {vocab_size}")
    return tuple(ids)


def _top_k(fields: JsonFields) -> int | None:
    """-1 means all tokens, as 0 does. Some files have a whole float."""
    value = fields.value("top_k")
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < -1:
        raise fields.wrong("top_k", f"{value!r} is not -1, 0 (all) or a number of tokens")
    return max(value, 0)


def _optional_number(fields: JsonFields, name: str, *, positive: bool = False) -> float | None:
    return fields.number(name, positive=positive) if fields.has(name) else None
