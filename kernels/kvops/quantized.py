"""Quantized weights, and their packing into the panels of the native kernels.

Weights are codes with a scale for each group of consecutive inputs of an output. A panel has 32
outputs. It consists of runs, and a run of a header and steps of 128 bytes (csrc/kernels.h). Scales
are fp16 there, relative to a scale of the output in fp32, which keeps them in fp16's range.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

QuantizedKind = Literal[
    "mxfp4", "fp8", "fp8-128", "int8", "int8-16", "int4-32", "int4-64", "int4-128"
]
"""The kinds of quantized weights, with their group; int8 has groups of 32, and fp8 has one scale
for all inputs of an output. CPUs compute neither fp8 nor mxfp4."""

Kind = QuantizedKind | Literal["float32", "bfloat16"]
"""The kinds of packed weights."""

PANEL = 32
"""The outputs of a panel."""

_ROWS = 256


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Weights [N, K] of one kind. All of its tensors have N rows."""

    codes: Tensor
    scales: Tensor

    def packed(self) -> tuple[Tensor, Tensor]:
        """Return the panels, uint8, and the outputs' scales, fp32 [N padded to 32]; of kinds that
        CPUs compute."""
        raise NotImplementedError


def group_of(kind: Kind) -> int:
    """Return the number of inputs that share a scale in memory, or 0 for weights that are not
    quantized."""
    groups = {"int8": 32, "fp8": 128, "mxfp4": 32}
    return groups[kind] if kind in groups else int(kind.partition("-")[2] or 0)


W = TypeVar("W", bound=QuantizedWeight)


def with_tensors(weight: W, change: Callable[[str], Tensor]) -> W:
    """The weight with `change(name)` in the place of each of its tensors."""
    names = [field.name for field in fields(weight)]
    tensors = {name: change(name) for name in names if isinstance(getattr(weight, name), Tensor)}
    return replace(weight, **tensors)


def packed_pieces(
    num_outputs: int, weights: Sequence[W], turn: int, num_bytes: int
) -> Iterator[Tensor]:
    """Give the `packed_bytes` of one linear made of several weights [n_i, K] of one kind, as
    consecutive uint8 pieces of about `num_bytes`. `turn` is as in `joined`."""
    whole = with_tensors(
        weights[0], lambda name: joined([getattr(weight, name) for weight in weights], turn)
    )
    step = max(1, num_bytes // (PANEL * whole.codes.shape[1])) * PANEL
    outputs = []
    for begin in range(0, num_outputs, step):
        rows = slice(begin, begin + step)
        part = with_tensors(whole, lambda name, rows=rows: getattr(whole, name)[rows])  # type: ignore[misc]
        panels, scales = part.packed()
        outputs.append(scales)
        yield panels
    yield torch.cat(outputs).view(torch.uint8)


def joined(parts: Sequence[Tensor], turn: int) -> Tensor:
    """Join tensors [n_i, ...] along their rows. If `turn` is not 0, runs of `turn` rows of each
    alternate, and zeros follow the end of a shorter tensor and fill the last run."""
    if not turn:
        return torch.cat(list(parts))
    longest = -(-max(len(part) for part in parts) // turn) * turn
    padded = []
    for part in parts:
        whole = part.new_zeros((longest, *part.shape[1:]))
        whole[: len(part)] = part
        padded.append(whole.view(-1, turn, *part.shape[1:]))
    return torch.stack(padded, dim=1).flatten(0, 2)


def by_rows(weight: Tensor, quantized: Callable[[Tensor], tuple[Tensor, ...]]) -> list[Tensor]:
    """Quantize weights [N, K] some rows at a time; this bounds the memory of intermediate
    results."""
    starts = range(0, len(weight), _ROWS)
    parts = [quantized(weight[begin : begin + _ROWS].float()) for begin in starts]
    return [torch.cat(part) for part in zip(*parts, strict=True)]


def output_scales(scales: Tensor) -> Tensor:
    """A scale for each output [N], by which the group scales [N, groups] are divided before they
    become fp16. It is the groups' scale if they have the same, and otherwise a power of two that
    makes them at most 1: neither division costs a bit of scales that are fp16 or the output's."""
    largest = scales.nan_to_num(1.0, 1.0).abs().amax(1)
    power = torch.exp2(largest.log2().ceil().nan_to_num(0.0, neginf=0.0))
    has_one = (scales == scales[:, :1]).all(1) & (scales[:, 0] != 0) & scales[:, 0].isfinite()
    return torch.where(has_one, scales[:, 0], power)


def stored(scales: Tensor) -> Tensor:
    """Group scales [N, groups] as panels keep them, in fp32."""
    outputs = output_scales(scales)[:, None]
    return (scales / outputs).half().float() * outputs


def headers(values: Tensor, runs: int) -> Tensor:
    """Numbers [N, groups], N a multiple of 32, as the bytes of fp16 headers
    [panels, runs, bytes]: of each group of a run, the numbers of all outputs."""
    num_panels = len(values) // PANEL
    halves = values.half().view(num_panels, PANEL, runs, -1).permute(0, 2, 3, 1)
    return halves.reshape(num_panels, runs, -1).contiguous().view(torch.uint8)


def padded(values: Tensor, rows: int, columns: int) -> Tensor:
    """Values [N, columns before] with zeros up to [rows, columns]."""
    return F.pad(values, (0, columns - values.shape[1], 0, rows - len(values)))
