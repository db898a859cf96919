"""Reads how a model rotates queries and keys (RoPE)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from services.model.config.families import Family
from services.model.config.json_fields import JsonFields
from services.model.config.neutral_fields import check_all_read


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """Linear RoPE scaling: divides every position by `factor`."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's RoPE scaling: stretches long wavelengths by `factor` and keeps short ones, with a
    smooth transition between."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True)
class YarnScaling:
    """YaRN (Peng et al., 2023): divides by `factor` the frequencies below the pair `low`, keeps
    those above `high`, and interpolates between; cosines and sines are multiplied by
    `magnitude`. `low` and `high` are indices of pairs, the fastest first."""

    factor: float
    low: float
    high: float
    magnitude: float


@dataclass(frozen=True, slots=True)
class LongScaling:
    """LongRoPE (Ding et al., 2024): divides each frequency by a number of its own. In a context of
    up to `original_max_position_embeddings` positions these are `short`, beyond it `long`;
    cosines and sines are multiplied by `magnitude`."""

    short: tuple[float, ...]
    long: tuple[float, ...]
    original_max_position_embeddings: int
    magnitude: float


@dataclass(frozen=True, slots=True)
class FrequencyDivisors:
    """RoPE scaling of GGUF files: divides each frequency by a number of its own."""

    divisors: tuple[float, ...]


Scaling = LinearScaling | Llama3Scaling | YarnScaling | LongScaling | FrequencyDivisors


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The rotation of a layer: of the first `width` dimensions of a head; None is all."""

    theta: float
    scaling: Scaling | None = None
    width: int | None = None


_FULL, _SLIDING = "full_attention", "sliding_attention"


def read_ropes(
    config: JsonFields, family: Family, head_dim: int, windows: Sequence[int | None]
) -> tuple[RopeConfig | None, ...]:
    """The rotation of each layer; None if it has none. Reads both forms: transformers 5 writes
    everything into `rope_parameters`, earlier versions wrote `rope_theta` beside `rope_scaling`."""
    name, fields = _scaling_fields(config, family)
    if family.ropes != "by layer type":
        rope = _rope(config, family, fields, config.number("rope_theta", 10_000.0), head_dim)
        return tuple(rope if has else None for has in rotated_layers(config, family, len(windows)))
    theta, local = config.number("rope_theta"), config.number("rope_local_base_freq")
    inner = _FULL in fields.values or _SLIDING in fields.values
    if name == "rope_parameters" and not inner and fields.values:
        raise config.wrong(name, f"has neither {_FULL} nor {_SLIDING}")
    full = fields.object(_FULL) if inner else fields
    sliding = fields.object(_SLIDING)
    if inner:
        check_all_read(fields)
    by_kind = {
        True: _rope(config, family, full, theta, head_dim),
        False: _rope(config, family, sliding, local, head_dim),
    }
    return tuple(by_kind[window is None] for window in windows)


def extended_context(config: JsonFields, family: Family) -> int:
    """The positions of the model's context. Files with YaRN or linear scaling may have the context
    before its extension, as vLLM and transformers read them. Layers with ropes of their own are
    stretched by different factors; then the file has the extended context."""
    context = config.integer("max_position_embeddings")
    _, fields = _scaling_fields(config, family)
    kind = fields.text("rope_type", fields.text("type", "default"))
    if family.ropes == "by layer type" or kind not in ("linear", "yarn"):
        return context
    original = _original(config, fields)
    return max(context, int(original * fields.number("factor", context / original)))


def _scaling_fields(config: JsonFields, family: Family) -> tuple[str, JsonFields]:
    """The fields of the rope's scaling, and the name of their object."""
    name = "rope_parameters" if config.has("rope_parameters") else "rope_scaling"
    fields = config.object(name)
    return name, fields if fields.values else replace(fields, values=family.rope_scaling)


def rotated_layers(config: JsonFields, family: Family, num_layers: int) -> list[bool]:
    """For each layer whether it has a rotation."""
    if family.ropes == "one":
        return [True] * num_layers
    interval = config.integer("no_rope_layer_interval", 4)
    if not config.has("no_rope_layers"):
        return [(layer + 1) % interval != 0 for layer in range(num_layers)]
    flags = config.value("no_rope_layers")
    if not isinstance(flags, list) or len(flags) != num_layers or not set(flags) <= {0, 1}:
        raise config.wrong("no_rope_layers", f"{flags!r} is not a list of {num_layers} of 0 and 1")
    return [flag == 1 for flag in flags]


def _rope(
    config: JsonFields, family: Family, fields: JsonFields, theta: float, head_dim: int
) -> RopeConfig:
    theta = fields.number("rope_theta", theta)
    part = fields.number("partial_rotary_factor", config.number("partial_rotary_factor", 1.0))
    width = int(head_dim * part)
    if part != 1 and (not family.partial_rotary or part > 1 or width < 2 or width % 2):
        reason = "rotates an odd or impossible number of dimensions"
        if not family.partial_rotary:
            reason = "this architecture rotates whole heads"
        raise fields.wrong("partial_rotary_factor", f"{part} of heads of {head_dim}: {reason}")
    scaling = _scaling(config, fields, theta, width)
    check_all_read(fields)
    return RopeConfig(theta, scaling, None if width == head_dim else width)


def _scaling(config: JsonFields, fields: JsonFields, theta: float, width: int) -> Scaling | None:
    """The scaling of `width` rotated dimensions."""
    kind = fields.text("rope_type", fields.text("type", "default"))
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(fields.number("factor"))
        case "dynamic":
            # It changes the frequencies only beyond max_position_embeddings, where no request gets.
            fields.number("factor")
            return None
        case "llama3":
            return _llama3(config, fields)
        case "yarn":
            return _yarn(config, fields, theta, width)
        case "longrope" | "su":
            return _longrope(config, fields, width)
    known = "default, linear, dynamic, llama3, yarn and longrope"
    raise fields.wrong("rope_type", f"{kind!r} is not supported, only {known}")


def _llama3(config: JsonFields, fields: JsonFields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_position_embeddings=_original(config, fields),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise fields.wrong("high_freq_factor", "is not above low_freq_factor")
    return scaling


def _original(config: JsonFields, fields: JsonFields) -> int:
    """The context that the model was trained with, before its rope was scaled."""
    name = "original_max_position_embeddings"
    inner = fields.integer(name, config.integer("max_position_embeddings"))
    return config.integer(name, inner)


def _yarn(config: JsonFields, fields: JsonFields, theta: float, width: int) -> YarnScaling:
    original = _original(config, fields)
    factor = fields.number("factor", config.integer("max_position_embeddings") / original)
    fast, slow = fields.number("beta_fast", 32.0), fields.number("beta_slow", 1.0)
    fields.value("finetuned")  # says how the checkpoint was made
    truncate = fields.boolean("truncate", default=True)
    low, high = yarn_band(theta, width, original, (fast, slow), truncate=truncate)
    return YarnScaling(factor, low, high, _yarn_magnitude(fields, factor))


def yarn_band(
    theta: float, width: int, original: int, turns: tuple[float, float], *, truncate: bool
) -> tuple[float, float]:
    """The pairs between which YaRN interpolates: they make so many turns in the original context.
    With `truncate` they are whole numbers."""

    def pair_of(num_turns: float) -> float:
        turns_of_first = original / (2 * math.pi)
        return width * math.log(turns_of_first / num_turns) / (2 * math.log(theta))

    low, high = map(pair_of, turns)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, width - 1)


def yarn_growth(factor: float, weight: float = 1.0) -> float:
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn_magnitude(fields: JsonFields, factor: float) -> float:
    mscale, of_all = (fields.number(name, 0.0, False) for name in ("mscale", "mscale_all_dim"))
    usual = yarn_growth(factor)
    if mscale and of_all:
        usual = yarn_growth(factor, mscale) / yarn_growth(factor, of_all)
    return fields.number("attention_factor", usual)


def _longrope(config: JsonFields, fields: JsonFields, width: int) -> LongScaling:
    original = _original(config, fields)
    factor = fields.number("factor", config.integer("max_position_embeddings") / original)
    usual = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongScaling(
        short=_divisors(fields, "short_factor", width // 2),
        long=_divisors(fields, "long_factor", width // 2),
        original_max_position_embeddings=original,
        magnitude=fields.number("attention_factor", usual),
    )


def _divisors(fields: JsonFields, name: str, length: int) -> tuple[float, ...]:
    values = fields.value(name)
    if not isinstance(values, list) or len(values) != length:
        found = f"{len(values)} numbers" if isinstance(values, list) else repr(values)
        raise fields.wrong(name, f"{found}, not a list of {length}, one for each rotated pair")
    if not all(isinstance(value, (int, float)) and 0 < value < math.inf for value in values):
        raise fields.wrong(name, "not all are positive numbers")
    return tuple(map(float, values))
