"""What a checkpoint's config.json and generation_config.json say, checked and in one spelling.

Light on purpose: the gateway reads it too, so no torch here.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common.errors import StartupError

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Every position is divided by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's: long wavelengths are stretched by `factor`, short ones kept, a smooth passage
    between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    scaling: LinearScaling | Llama3Scaling | None = None


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """The checkpoint's own sampling parameters; None where it has none."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of one of the families in `_FAMILIES`.

    `qkv_bias`, `o_bias`, `mlp_bias`: which linears carry a bias. `qk_norm`: queries and keys are
    normed per head before rotation. `dtype`: of the weights in the files, one of `DTYPES`.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    dtype: str
    eos_token_ids: tuple[int, ...]
    generation: GenerationDefaults

    @classmethod
    def from_directory(cls, directory: Path | str) -> "ModelConfig":
        """Read a Hugging Face checkpoint's configuration.

        StartupError, naming file and field: no such file, not JSON, an unknown architecture,
        shapes that contradict each other, or a feature that is not supported.
        """
        directory = Path(directory)
        if not directory.is_dir():
            raise StartupError(f"{directory}: no such checkpoint directory")
        config = _Fields.read(directory / CONFIG_FILE)
        generation_path = directory / GENERATION_FILE
        generation = (
            _Fields.read(generation_path)
            if generation_path.exists()
            else _Fields(generation_path, {})
        )
        return _model_config(config, generation)


@dataclass(frozen=True, slots=True)
class _Family:
    """Where the families differ; what a config.json leaves out takes these values, as in
    transformers."""

    qk_norm: bool
    always_qkv_bias: bool
    default_head_dim: int | None


_FAMILIES: Mapping[str, _Family] = {
    "LlamaForCausalLM": _Family(qk_norm=False, always_qkv_bias=False, default_head_dim=None),
    "Qwen2ForCausalLM": _Family(qk_norm=False, always_qkv_bias=True, default_head_dim=None),
    "Qwen3ForCausalLM": _Family(qk_norm=True, always_qkv_bias=False, default_head_dim=128),
}


@dataclass(frozen=True, slots=True)
class _Fields:
    """A JSON object whose fields are read with their type checked; `prefix` is what leads to it."""

    path: Path
    values: Mapping[str, Any]
    prefix: str = ""

    @classmethod
    def read(cls, path: Path) -> "_Fields":
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as exc:
            raise StartupError(f"{path}: {exc.strerror}") from exc
        except ValueError as exc:  # also what is not UTF-8
            raise StartupError(f"{path}: not JSON: {exc}") from exc
        if not isinstance(values, dict):
            raise StartupError(f"{path}: not a JSON object")
        return cls(path, values)

    def wrong(self, name: str, text: str) -> StartupError:
        return StartupError(f"{self.path}: {self.prefix}{name}: {text}")

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        value = self.values[name] if self.has(name) else default
        if value is None:
            raise self.wrong(name, "missing")
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(name, f"{value!r} is not an integer >= {least}")
        return value

    def number(self, name: str, default: float | None = None, positive: bool = True) -> float:
        value = self.values[name] if self.has(name) else default
        if value is None:
            raise self.wrong(name, "missing")
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.wrong(name, f"{value!r} is not a number")
        if not math.isfinite(value) or value < 0 or (positive and value == 0):
            raise self.wrong(name, f"{value!r} is not {'positive' if positive else '0 or more'}")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values[name] if self.has(name) else default
        if not isinstance(value, bool):
            raise self.wrong(name, f"{value!r} is not true or false")
        return value

    def text(self, name: str, default: str | None = None) -> str:
        value = self.values[name] if self.has(name) else default
        if not isinstance(value, str):
            raise self.wrong(name, "missing" if value is None else f"{value!r} is not a string")
        return value

    def object(self, name: str) -> "_Fields":
        value = self.values.get(name) or {}
        if not isinstance(value, dict):
            raise self.wrong(name, f"{value!r} is not an object")
        return _Fields(self.path, value, f"{self.prefix}{name}.")


def _model_config(config: _Fields, generation: _Fields) -> ModelConfig:
    architecture = _architecture(config)
    family = _FAMILIES[architecture]
    _refuse_unsupported(config)
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    vocab_size = config.integer("vocab_size")
    bias = config.boolean("attention_bias", default=False)
    return ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        num_layers=config.integer("num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, num_heads),
        head_dim=_head_dim(config, family, hidden_size, num_heads),
        intermediate_size=config.integer("intermediate_size"),
        vocab_size=vocab_size,
        max_position_embeddings=config.integer("max_position_embeddings"),
        rms_norm_eps=config.number("rms_norm_eps", 1e-6),
        rope=_rope(config),
        tied_embeddings=config.boolean("tie_word_embeddings", default=False),
        qk_norm=family.qk_norm,
        qkv_bias=family.always_qkv_bias or bias,
        o_bias=bias and not family.always_qkv_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and config.boolean("mlp_bias", default=False),
        dtype=_dtype(config),
        eos_token_ids=_eos_token_ids(config, generation, vocab_size),
        generation=_generation_defaults(generation),
    )


def _architecture(config: _Fields) -> str:
    known = ", ".join(_FAMILIES)
    names = config.values.get("architectures")
    if not isinstance(names, list) or len(names) != 1:
        raise config.wrong("architectures", f"{names!r} is not a list of one of {known}")
    if names[0] not in _FAMILIES:
        raise config.wrong("architectures", f"{names[0]!r} is not supported; these are: {known}")
    return str(names[0])


def _refuse_unsupported(config: _Fields) -> None:
    if config.has("quantization_config"):
        raise config.wrong("quantization_config", "quantized weights are not supported")
    if config.boolean("use_sliding_window", default=False):
        raise config.wrong("use_sliding_window", "sliding window attention is not supported")
    layer_types = config.values.get("layer_types") or []
    if not isinstance(layer_types, list):
        raise config.wrong("layer_types", f"{layer_types!r} is not a list")
    for kind in layer_types:
        if kind != "full_attention":
            raise config.wrong("layer_types", f"{kind!r} is not supported")
    if (act := config.text("hidden_act", "silu")) != "silu":
        raise config.wrong("hidden_act", f"{act!r} is not supported, only 'silu'")


def _num_kv_heads(config: _Fields, num_heads: int) -> int:
    num_kv_heads = config.integer("num_key_value_heads", default=num_heads)
    if num_heads % num_kv_heads:
        raise config.wrong(
            "num_key_value_heads", f"{num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    return num_kv_heads


def _head_dim(config: _Fields, family: _Family, hidden_size: int, num_heads: int) -> int:
    if not config.has("head_dim") and family.default_head_dim is None and hidden_size % num_heads:
        raise config.wrong(
            "hidden_size", f"{hidden_size} is not a multiple of num_attention_heads {num_heads}"
        )
    head_dim = config.integer("head_dim", family.default_head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise config.wrong("head_dim", f"{head_dim} is odd; rotary embeddings need pairs")
    return head_dim


def _rope(config: _Fields) -> RopeConfig:
    """Both spellings: transformers 5 has all of it in `rope_parameters`, earlier ones had
    `rope_theta` beside `rope_scaling`."""
    fields = config.object("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    theta = fields.number("rope_theta", config.number("rope_theta", 10_000.0))
    for owner in (config, fields):
        if owner.number("partial_rotary_factor", 1.0) != 1.0:
            raise owner.wrong("partial_rotary_factor", "partial rotation is not supported")
    kind = fields.text("rope_type", fields.text("type", "default"))
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, LinearScaling(fields.number("factor")))
    if kind == "llama3":
        return RopeConfig(theta, _llama3(fields))
    raise fields.wrong("rope_type", f"{kind!r} is not supported, only default, linear and llama3")


def _llama3(fields: _Fields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_position_embeddings=fields.integer("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise fields.wrong("high_freq_factor", "is not above low_freq_factor")
    return scaling


def _dtype(config: _Fields) -> str:
    name = "dtype" if config.has("dtype") else "torch_dtype"  # transformers 5, and before
    dtype = config.text(name, "float32")
    if dtype not in DTYPES:
        raise config.wrong(name, f"{dtype!r} is not supported, only {', '.join(DTYPES)}")
    return dtype


def _eos_token_ids(config: _Fields, generation: _Fields, vocab_size: int) -> tuple[int, ...]:
    owner = generation if generation.has("eos_token_id") else config
    value = owner.values.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    for token_id in ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise owner.wrong("eos_token_id", f"{value!r} is neither a token id nor a list of them")
        if not 0 <= token_id < vocab_size:
            raise owner.wrong("eos_token_id", f"{token_id} is outside the vocabulary {vocab_size}")
    return tuple(ids)


def _generation_defaults(fields: _Fields) -> GenerationDefaults:
    for name in ("top_p", "min_p"):
        if fields.has(name) and fields.number(name, positive=False) > 1:
            raise fields.wrong(name, f"{fields.values[name]!r} is above 1")
    return GenerationDefaults(
        temperature=_optional_number(fields, "temperature"),
        top_k=fields.integer("top_k", least=0) if fields.has("top_k") else None,
        top_p=fields.number("top_p") if fields.has("top_p") else None,
        min_p=_optional_number(fields, "min_p"),
    )


def _optional_number(fields: _Fields, name: str) -> float | None:
    return fields.number(name, positive=False) if fields.has(name) else None
