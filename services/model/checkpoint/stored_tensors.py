"""Names, shapes and dtypes of the tensors that a checkpoint must have. A linear is one tensor, or
several if it is quantized; the tensors that exist tell which."""

from collections.abc import Collection
from dataclasses import dataclass

from services.model.config.layout import EMBEDDING, Shape, is_stacked_experts, weight_shapes
from services.model.config.model_config import ModelConfig
from services.model.config.quantization import Format, StoredQuantization

FLOATS = ("BF16", "F16", "F32")
FP8_BLOCK = 128
MXFP4_GROUP = 32
_NIBBLES = 8
"""The 4-bit values in an int32."""

_MARKS: dict[Format, tuple[str, ...]] = {
    "gptq": ("qweight",),
    "awq": ("qweight",),
    "pack-quantized": ("weight_packed",),
    "int-quantized": ("weight_scale",),
    "fp8": ("weight_scale", "weight_scale_inv"),
}
"""The tensors that a linear has only if it is quantized: one of these."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The shapes and dtypes (in safetensors' names) that a tensor may have."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...] = FLOATS
    optional: bool = False
    """Whether the tensor may be missing."""


def expected_tensors(config: ModelConfig, present: Collection[str]) -> dict[str, Expected]:
    """The tensors of a checkpoint that has this config and tensors with the names `present`."""
    found: dict[str, Expected] = {}
    for name, shape in weight_shapes(config).items():
        linear = name.removesuffix(".weight")
        stored = config.quantization
        if stored is not None and stored.format == "mxfp4" and is_stacked_experts(name):
            num, inputs, outputs = shape
            groups = -(-inputs // MXFP4_GROUP)
            found[f"{name}_blocks"] = Expected(((num, outputs, groups, 16),), ("U8",))
            found[f"{name}_scales"] = Expected(((num, outputs, groups),), ("U8",))
            continue
        if stored is None or not (is_linear(name, shape) and mark(stored, linear, present)):
            found[name] = Expected((shape,))
            continue
        for part, expected in _parts(stored, *shape).items():
            found[f"{linear}.{part}"] = expected
        if stored.format == "fp8":
            found[f"{linear}.{mark(stored, linear, present)}"] = _fp8_scale(stored, *shape)
        if stored.format == "gptq":  # Some tools store a bias of zeros with every linear.
            found.setdefault(f"{linear}.bias", Expected((shape[:1],), optional=True))
    return found


def is_linear(name: str, shape: Shape) -> bool:
    return len(shape) == 2 and name != EMBEDDING


def mark(stored: StoredQuantization, linear: str, present: Collection[str]) -> str | None:
    """The name of the tensor that shows that this linear is quantized, or None if it is not."""
    marks = _MARKS.get(stored.format, ())
    return next((name for name in marks if f"{linear}.{name}" in present), None)


def _parts(stored: StoredQuantization, n: int, k: int) -> dict[str, Expected]:
    """The tensors of a quantized linear [n, k], by the last part of their names."""
    num_groups = -(-k // stored.group) if stored.group else 1
    words_k, words_n = -(-k // _NIBBLES), -(-n // _NIBBLES)
    match stored.format:
        case "gptq":
            return {
                "qweight": Expected(((words_k, n),), ("I32",)),
                "qzeros": Expected(((num_groups, words_n),), ("I32",)),
                "scales": Expected(((num_groups, n),)),
                "g_idx": Expected(((k,),), ("I32",), optional=True),
            }
        case "awq":
            return {
                "qweight": Expected(((k, words_n),), ("I32",)),
                "qzeros": Expected(((num_groups, words_n),), ("I32",)),
                "scales": Expected(((num_groups, n),)),
            }
        case "pack-quantized":
            parts = {
                "weight_packed": Expected(((n, words_k),), ("I32",)),
                "weight_scale": Expected(((n, num_groups),)),
                "weight_shape": Expected(((2,),), ("I32", "I64"), optional=True),
            }
            if not stored.symmetric:
                parts["weight_zero_point"] = Expected(((words_n, num_groups),), ("I32",))
            return parts
        case "int-quantized":
            return {
                "weight": Expected(((n, k),), ("I8",)),
                "weight_scale": Expected(((n, 1), (n,))),
            }
        case _:
            return {
                "weight": Expected(((n, k),), ("F8_E4M3",)),
                "input_scale": Expected(((), (1,)), optional=True),  # of engines that compute fp8
            }


def _fp8_scale(stored: StoredQuantization, n: int, k: int) -> Expected:
    if stored.block:
        return Expected(((-(-n // FP8_BLOCK), -(-k // FP8_BLOCK)),))
    return Expected(((), (1,), (n, 1)))
