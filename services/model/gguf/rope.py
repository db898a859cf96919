"""Reads how the model of a GGUF file rotates queries and keys."""

import math
import struct

from services.model.config.families import Family
from services.model.config.json_fields import JsonFields
from services.model.config.rope_config import (
    FrequencyDivisors,
    LinearScaling,
    LongScaling,
    RopeConfig,
    Scaling,
    YarnScaling,
    yarn_band,
    yarn_growth,
)
from services.model.gguf.file import GgufFile
from services.runtime.errors import StartupError

DIVISORS = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"

_LOCAL_BASE = 10_000.0
"""The base of Gemma 3's layers with a window, in files that do not say it."""


def read_ropes(
    file: GgufFile, fields: JsonFields, family: Family, head_dim: int, windows: list[int | None]
) -> tuple[RopeConfig | None, ...]:
    """The rotation of each layer; None if it has none."""
    width = _width(fields, family, head_dim)
    theta = fields.number("rope.freq_base", 10_000.0)
    scaling = _scaling(file, fields, family, theta, width)
    rope = RopeConfig(theta, scaling, None if width == head_dim else width)
    match family.ropes:
        case "by layer type":
            local = RopeConfig(fields.number("rope.freq_base_swa", _LOCAL_BASE))
            return tuple(rope if window is None else local for window in windows)
        case "some layers":  # The files have no field for it.
            return tuple(rope if (i + 1) % 4 != 0 else None for i in range(len(windows)))
        case _:
            return (rope,) * len(windows)


def _width(fields: JsonFields, family: Family, head_dim: int) -> int:
    width = fields.integer("rope.dimension_count", head_dim)
    if width == head_dim or (family.partial_rotary and width < head_dim and width % 2 == 0):
        return width
    raise fields.wrong("rope.dimension_count", f"{width}, but the size of a head is {head_dim}")


def extended_context(fields: JsonFields, family: Family) -> int:
    """The positions of the model's context; as for config.json, YaRN and linear scaling extend the
    one that the model was trained with."""
    context = fields.integer("context_length")
    usual = "linear" if fields.has("rope.scaling.factor") else "none"
    kind = fields.text("rope.scaling.type", usual)
    if family.ropes == "by layer type" or kind not in ("linear", "yarn"):
        return context
    original = fields.integer("rope.scaling.original_context_length", context)
    return max(context, int(original * fields.number("rope.scaling.factor", context / original)))


def _scaling(
    file: GgufFile, fields: JsonFields, family: Family, theta: float, width: int
) -> Scaling | None:
    # As llama.cpp has it: a factor without a type is linear, and Phi-3 has factors without a type.
    usual = "linear" if fields.has("rope.scaling.factor") else "none"
    if LONG in file.tensors or SHORT in file.tensors:
        usual = "longrope"
    kind = fields.text("rope.scaling.type", usual)
    context = fields.integer("context_length")
    original = fields.integer("rope.scaling.original_context_length", context)
    if DIVISORS in file.tensors:
        if kind != "none":
            raise fields.wrong("rope.scaling.type", f"{kind!r} beside {DIVISORS}")
        return FrequencyDivisors(_divisors(file, DIVISORS, width))
    match kind:
        case "none":
            return None
        case "linear":
            return LinearScaling(fields.number("rope.scaling.factor"))
        case "yarn":
            return _yarn(fields, family, theta, width, original)
        case "longrope":
            magnitude = fields.number("rope.scaling.attn_factor", 1.0)
            short, long = (_divisors(file, name, width) for name in (SHORT, LONG))
            return LongScaling(short, long, original, magnitude)
    known = "none, linear, yarn and longrope"
    raise fields.wrong("rope.scaling.type", f"{kind!r} is not supported, only {known}")


def _yarn(
    fields: JsonFields, family: Family, theta: float, width: int, original: int
) -> YarnScaling:
    if theta <= 1:
        raise fields.wrong("rope.freq_base", f"{theta} is not above 1")
    factor = fields.number("rope.scaling.factor")
    fast = fields.number("rope.scaling.yarn_beta_fast", 32.0)
    slow = fields.number("rope.scaling.yarn_beta_slow", 1.0)
    # The files do not say it: gpt-oss has a band that is not truncated, like its config.json.
    truncate = family.rope_scaling.get("truncate", True)
    low, high = yarn_band(theta, width, original, (fast, slow), truncate=truncate)
    magnitude = fields.number("rope.scaling.yarn_attn_factor", yarn_growth(factor))
    magnitude *= fields.number("rope.scaling.attn_factor", 1.0)
    return YarnScaling(factor, low, high, magnitude)


def _divisors(file: GgufFile, name: str, width: int) -> tuple[float, ...]:
    """The numbers by which the frequencies of `width` rotated dimensions are divided."""
    if name not in file.tensors:
        raise StartupError(f"{file.path}: missing tensor: {name}")
    tensor = file.tensors[name]
    if tensor.type.name != "F32" or tensor.shape != (width // 2,):
        found = f"{tensor.type.name} {list(tensor.shape)}"
        raise StartupError(f"{tensor.path}: {name}: {found}, not F32 [{width // 2}]")
    with tensor.path.open("rb") as opened:
        opened.seek(tensor.begin)
        values = struct.unpack(f"<{width // 2}f", opened.read(tensor.num_bytes))
    if not all(0 < value < math.inf for value in values):
        raise StartupError(f"{tensor.path}: {name}: not all are positive numbers")
    return values
