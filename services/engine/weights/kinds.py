"""Chooses the kind of each linear, from what the checkpoint stores and from
`--quantize`, and converts the checkpoint's weights to it."""

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor

from kvops.fp4 import Float4Weight
from kvops.fp8 import Float8Weight
from kvops.int4 import Int4Weight
from kvops.int8 import Int8Weight
from kvops.quantized import Kind, group_of
from services.engine.weights.fused_weights import HEAD_SECTION, Section
from services.engine.weights.weights import Form, Weight, Weights
from services.model.config.quantization import Quantization, StoredKind
from services.runtime.errors import StartupError

_WIDTHS: tuple[Form, ...] = (
    *("mxfp4", "int4-128", "int4-64", "int4-32", "int8", "int8-16", "fp8", "fp8-128", "float"),
)


def section_kinds(
    sections: Collection[Section],
    weights: Weights,
    dtype: torch.dtype,
    quantize: Quantization | None,
) -> dict[str, Kind]:
    """The kind of each section. Stored quantized weights keep their kind; a section of several
    kinds gets the widest of them. `quantize` is for weights in floating point, which may be beside
    quantized ones.

    Raises StartupError if the checkpoint is quantized, and `quantize` is another kind.
    """
    forms = {s.name: _widest(weights.form(source) for source in s.sources) for s in sections}
    quantized = [form for form in forms.values() if form != "float"]
    wanted = None if quantize is None else kind_of(quantize)
    if quantized:
        narrowest = min(quantized, key=_WIDTHS.index)
        if wanted not in (None, narrowest):
            raise StartupError(
                f"the checkpoint is already quantized ({narrowest}); "
                f"it cannot be quantized again, to {wanted}"
            )
        dtype = torch.bfloat16
    plain: Kind = wanted or ("float32" if dtype == torch.float32 else "bfloat16")
    kinds: dict[str, Kind] = {n: plain if f == "float" else f for n, f in forms.items()}
    if wanted and forms[HEAD_SECTION] == "float":
        kinds[HEAD_SECTION] = "int8"  # Logits show the errors of 4 bits most.
    return kinds | {section.name: "float32" for section in sections if section.is_exact}


def kind_of(quantize: Quantization | StoredKind) -> Kind:
    return "int4-64" if quantize == "int4" else quantize


def packable(kind: Kind, parts: Sequence[Weight]) -> Sequence[Weight]:
    """The weights of one section as the kernels can pack them: all quantized as `kind` says, or all
    floating point of one dtype, fp32 or bf16."""
    in_8_bits = [part for part in parts if isinstance(part, Int8Weight)]
    if len(in_8_bits) == len(parts) and kind in ("int8", "int8-16"):
        return [part.regrouped(group_of(kind)) for part in in_8_bits]
    if all(isinstance(part, Int4Weight) and part.group == group_of(kind) for part in parts):
        return parts
    for form, is_own in ((Float8Weight, kind.startswith("fp8")), (Float4Weight, kind == "mxfp4")):
        if is_own and all(isinstance(part, form) for part in parts):
            return parts
    floats = [part if isinstance(part, Tensor) else part.dequantized() for part in parts]
    is_bf16 = all(part.dtype == torch.bfloat16 for part in floats)
    return floats if is_bf16 else [part.float() for part in floats]


def _widest(forms: Iterable[Form]) -> Form:
    return max(forms, key=_WIDTHS.index)
