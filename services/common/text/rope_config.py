"""Reads how a model rotates queries and keys (RoPE)."""

from dataclasses import dataclass

from services.common.text.json_fields import JsonFields
from services.common.text.neutral_fields import check_all_read


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
class FrequencyDivisors:
    """RoPE scaling of GGUF files: divides each frequency by a number of its own."""

    divisors: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    theta: float
    scaling: LinearScaling | Llama3Scaling | FrequencyDivisors | None = None


def read_rope(config: JsonFields) -> RopeConfig:
    """Read both forms: transformers 5 writes everything into `rope_parameters`, earlier versions
    wrote `rope_theta` beside `rope_scaling`."""
    fields = config.object("rope_parameters" if config.has("rope_parameters") else "rope_scaling")
    theta = fields.number("rope_theta", config.number("rope_theta", 10_000.0))
    for owner in (config, fields):
        if owner.number("partial_rotary_factor", 1.0) != 1.0:
            raise owner.wrong("partial_rotary_factor", "partial rotation is not supported")
    scaling = _scaling(fields)
    check_all_read(fields)
    return RopeConfig(theta, scaling)


def _scaling(fields: JsonFields) -> LinearScaling | Llama3Scaling | None:
    kind = fields.text("rope_type", fields.text("type", "default"))
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(fields.number("factor"))
        case "llama3":
            return _llama3(fields)
    raise fields.wrong("rope_type", f"{kind!r} is not supported, only default, linear and llama3")


def _llama3(fields: JsonFields) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=fields.number("factor"),
        low_freq_factor=fields.number("low_freq_factor"),
        high_freq_factor=fields.number("high_freq_factor"),
        original_max_position_embeddings=fields.integer("original_max_position_embeddings"),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise fields.wrong("high_freq_factor", "is not above low_freq_factor")
    return scaling
