"""Quantized weights as the kernels of GPUs read them.

Inputs come in chunks of 128; zeros follow the last input. A byte has a code, or two of four bits:
of inputs i and i + `width`. So the bytes of a tile have the codes of two runs of neighbouring
inputs, and each run is in one group:

    groups of 128   | 0, 64 | 1, 65 | ... | 63, 127 |
    groups of 32    | 0, 32 | 1, 33 | ... | 31, 63 | 64, 96 | ... | 95, 127 |

weight = scale of the output * scale of the group * (code - zero point)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvops import fp4, int4, int8
from kvops.fp4 import Float4Weight
from kvops.fp8 import Float8Weight
from kvops.int4 import Int4Weight
from kvops.int8 import Int8Weight
from kvops.quantized import Kind, group_of, output_scales, padded, with_tensors

CHUNK = 128

Form = Literal["int4", "fp4", "int8", "fp8"]
AnyWeight = Tensor | Int4Weight | Int8Weight | Float4Weight | Float8Weight
_FLOATS: dict[Kind, type[Float4Weight] | type[Float8Weight]] = {
    "fp8": Float8Weight,
    "fp8-128": Float8Weight,
    "mxfp4": Float4Weight,
}
"""Kinds that no weights are rounded to."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """Quantized weights [N, K] of one linear."""

    kind: Kind
    num_inputs: int
    codes: Tensor
    """uint8 [N, bytes of an output]. Integers of eight bits have the zero point 128; fp8 codes are
    the bits of e4m3 numbers, and fp4 codes of e2m1 numbers, without a zero point."""
    scales: Tensor
    """int32 [groups, N]: the bits of an fp32 scale, or for codes of four bits those of an fp16
    scale below those of an fp16 zero point; for fp4 [chunks, N]: the exponents of the four blocks
    of a chunk, a byte each."""
    outputs: Tensor
    """The scale of each output, fp32 [N]."""

    @property
    def group(self) -> int:
        return group_of(self.kind)

    @property
    def form(self) -> Form:
        if self.kind == "mxfp4":
            return "fp4"
        if self.kind.startswith("fp8"):
            return "fp8"
        return "int4" if self.kind.startswith("int4") else "int8"

    @property
    def width(self) -> int:
        """The number of neighbouring bytes of an output that have codes of one group, or of two
        groups for codes of four bits."""
        return min(self.group, CHUNK // 2) if self.form in ("int4", "fp4") else self.group

    def __post_init__(self) -> None:
        """Raises ValueError if the tensors do not fit together."""
        device = self.codes.device
        for name, wanted in like(self.kind, len(self.codes), self.num_inputs).items():
            found = getattr(self, name)
            if (found.shape, found.dtype, found.device) != (wanted.shape, wanted.dtype, device):
                raise ValueError(f"{name}: {found.dtype} {list(found.shape)} on {found.device}")

    def rows(self, begin: int, end: int) -> "GroupedWeight":
        """Some of the outputs."""
        part = slice(begin, end)
        scales = self.scales[:, part].contiguous()
        return GroupedWeight(
            self.kind, self.num_inputs, self.codes[part], scales, self.outputs[part]
        )

    def relative(self) -> Tensor:
        """The weights [N, K] without the outputs' scales, fp32."""
        n = len(self.codes)
        words = self.scales.T.contiguous().view(n, -1, 1)
        if self.form in ("int4", "fp4"):
            runs = self.codes.view(n, -1, 1, self.width)
            codes = torch.cat([runs & 15, runs >> 4], dim=2)
        if self.form == "fp4":
            exponents = words.view(torch.uint8).view(n, -1, 1)
            codes, zeros = fp4.values(codes), torch.tensor(0.0, device=codes.device)
            scales = torch.exp2(exponents.float() - 127)
        elif self.form == "int4":
            scales, zeros = words.view(torch.float16).float().chunk(2, dim=2)
        else:
            is_float, scales = self.form == "fp8", words.view(torch.float32)
            codes = self.codes.view(torch.float8_e4m3fn).float() if is_float else self.codes
            zeros = torch.tensor(0.0 if is_float else 128.0, device=codes.device)
        weights: Tensor = (codes.reshape(n, -1, self.group) - zeros) * scales
        return weights.view(n, -1)[:, : self.num_inputs]


def as_kind(kind: Kind, weights: Sequence[AnyWeight]) -> list[Int4Weight | Int8Weight]:
    """The weights quantized as `kind` says, those in floating point by rounding. Raises ValueError
    if weights are quantized in another way."""
    group = group_of(kind)
    bits, form = (int8, Int8Weight) if kind.startswith("int8") else (int4, Int4Weight)
    quantized = [bits.quantize(w, group) if isinstance(w, Tensor) else w for w in weights]
    fitting = [w for w in quantized if isinstance(w, form) and w.group == group]
    if len(fitting) < len(weights):
        raise ValueError(f"weights that are quantized in another way are not packed as {kind}")
    return fitting


def pack(kind: Kind, weights: Sequence[AnyWeight]) -> GroupedWeight:
    """Join weights [n_i, K] along their outputs. Raises ValueError as `as_kind` does."""
    form = _FLOATS.get(kind)
    as_stored = [weight for weight in weights if form is not None and isinstance(weight, form)]
    parts: Sequence[Int4Weight | Int8Weight | Float4Weight | Float8Weight] = as_stored
    if len(as_stored) < len(weights):
        parts = as_kind(kind, weights)
    whole = with_tensors(parts[0], lambda name: torch.cat([getattr(part, name) for part in parts]))
    (n, k), group = whole.codes.shape, group_of(kind)
    inputs = -(-k // CHUNK) * CHUNK
    codes = padded(whole.codes, n, inputs)
    if isinstance(whole, Int4Weight | Float4Weight):
        runs = codes.view(n, -1, 2, min(group, CHUNK // 2))
        codes = (runs[:, :, 0] | runs[:, :, 1] << 4).view(n, -1)
    if isinstance(whole, Float4Weight):
        words = padded(whole.scales, n, inputs // group).view(torch.int32)
        return GroupedWeight(kind, k, codes, words.T.contiguous(), torch.ones(n))
    outputs = output_scales(whole.scales)
    scales = padded(whole.scales / outputs[:, None], n, inputs // group)
    if isinstance(whole, Int4Weight):
        pairs = torch.stack([scales, padded(whole.zeros, n, inputs // group)], dim=2)
        words = pairs.half().view(torch.int32).squeeze(2)
    else:
        words = scales.view(torch.int32)
        codes = codes if kind.startswith("fp8") else codes.view(torch.uint8) ^ 128
    return GroupedWeight(kind, k, codes, words.T.contiguous(), outputs)


def like(kind: Kind, n: int, k: int) -> dict[str, Tensor]:
    """Tensors on no device, with the shapes and dtypes of a `GroupedWeight`'s."""
    inputs = -(-k // CHUNK) * CHUNK
    num_bytes = inputs // 2 if kind.startswith("int4") or kind == "mxfp4" else inputs
    num_words = inputs // (CHUNK if kind == "mxfp4" else group_of(kind))
    return {
        "codes": torch.empty(n, num_bytes, dtype=torch.uint8, device="meta"),
        "scales": torch.empty(num_words, n, dtype=torch.int32, device="meta"),
        "outputs": torch.empty(n, device="meta"),
    }
