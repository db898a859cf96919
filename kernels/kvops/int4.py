"""Four-bit weights: quantization, and packing into the panels of the native kernels.

A group is 32, 64 or 128 consecutive inputs of an output. Its weights share a scale and a zero
point: weight = scale * (code - zero), with codes from 0 to 15.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

_PANEL = 32
_HIGHEST = 15
_STEP = 8
"""The inputs of a step of a panel."""

_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""The parts of a group's range that are tried: a smaller range cuts off outliers but has smaller
steps."""

_MOST_ZERO = 2048.0
"""The largest zero point: up to here fp16 has all whole numbers."""

_ROWS = 256
"""The outputs that are quantized at once; this bounds the memory of intermediate results."""


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """Quantized weights [N, K]. codes: uint8 [N, K]. scales, zeros: fp32 [N, ceil(K / group)]."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    group: int

    def dequantized(self) -> Tensor:
        """Return the weights [N, K], fp32."""
        n, k = self.codes.shape
        padded = F.pad(self.codes, (0, -k % self.group)).view(n, -1, self.group)
        weights = (padded - self.zeros[:, :, None]).mul_(self.scales[:, :, None])
        return weights.view(n, -1)[:, :k]


def quantize(weight: Tensor, group: int) -> Int4Weight:
    """Quantize weights [N, K], with the least squared error of some ranges for each group. A group
    with a weight that is not finite has a NaN scale."""
    parts = [
        _quantized(weight[begin : begin + _ROWS].float(), group)
        for begin in range(0, len(weight), _ROWS)
    ]
    codes, scales, zeros = (torch.cat(part) for part in zip(*parts, strict=True))
    return Int4Weight(codes, scales, zeros, group)


def _quantized(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and zeros of some rows."""
    n, k = weight.shape
    values = F.pad(weight, (0, -k % group), "replicate").view(n, -1, group)
    low, high = values.amin(2, keepdim=True), values.amax(2, keepdim=True)
    middle, best_error = (low + high) / 2, torch.full_like(low, math.inf)
    best_scale, best_zero = torch.zeros_like(low), torch.zeros_like(low)
    for shrink in _SHRINKS:
        scale = (high - low) * (shrink / _HIGHEST)
        scale = scale.maximum(low.abs() / _MOST_ZERO).maximum(high.abs() / _MOST_ZERO)
        scale, zero = _fitted(values, scale, _HIGHEST / 2 - middle / scale)
        scale, zero = _stored(scale, zero)
        found = scale * (_codes(values, scale, zero) - zero)
        error = ((found - values) / (high - low)).square().sum(2, keepdim=True)
        worse = error > best_error  # A NaN is not worse: it has to be kept.
        best_error = best_error.where(worse, error)
        best_scale, best_zero = best_scale.where(worse, scale), best_zero.where(worse, zero)
    scale, zero = best_scale, best_zero
    codes = _codes(values, scale, zero).to(torch.uint8).view(n, -1)[:, :k]
    return codes, scale.squeeze(2), zero.squeeze(2)


def _fitted(values: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """The scale and zero point with the least squared error for the codes that these ones give."""
    codes = _codes(values, scale, zero)
    code_mean, value_mean = codes.mean(2, keepdim=True), values.mean(2, keepdim=True)
    spread = (codes - code_mean).square().sum(2, keepdim=True)
    slope = ((codes - code_mean) * (values - value_mean)).sum(2, keepdim=True) / spread
    zero_of_slope = code_mean - value_mean / slope
    usable = (slope > 0) & (zero_of_slope.abs() <= _MOST_ZERO)
    return slope.where(usable, scale), zero_of_slope.where(usable, zero)


def _codes(values: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    codes = (values / scale + zero).round_().clamp_(0, _HIGHEST)
    return codes.nan_to_num_(0.0)  # All weights of the group are 0, or one is not finite.


def _stored(scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """Scales [N, groups, 1] and zero points as they are stored. All-zero groups have zeros."""
    exponent = _column_scales(scale.flatten(1))[:, None, None]
    stored = (scale / exponent).half().float() * exponent
    return stored, zero.where(scale != 0, 0.0).half().float()


def _column_scales(scales: Tensor) -> Tensor:
    """A power of two for each output [N], so that the scales divided by it are at most 1: fp16 is
    exact enough below, and a division by it costs no bit."""
    largest = scales.nan_to_num(1.0, 1.0).abs().amax(1)
    return torch.exp2(largest.log2().ceil().nan_to_num(0.0, neginf=0.0))


def packed(weight: Int4Weight) -> tuple[Tensor, Tensor]:
    """Return the panels, uint8, and the outputs' scales, fp32 [N padded to 32]."""
    group = weight.group
    n, k = weight.codes.shape
    num_panels, num_groups = -(-n // _PANEL), weight.scales.shape[1]
    more_rows, more_columns = num_panels * _PANEL - n, num_groups * group - k
    codes = F.pad(weight.codes, (0, more_columns, 0, more_rows))
    low, high = codes.view(num_panels, _PANEL, num_groups, group // _STEP, 2, 4).unbind(4)
    steps = (low | high << 4).permute(0, 2, 3, 1, 4).reshape(num_panels, num_groups, -1)
    outputs = _column_scales(F.pad(weight.scales, (0, 0, 0, more_rows)))
    pair = (
        F.pad(weight.scales, (0, 0, 0, more_rows)) / outputs[:, None],
        F.pad(weight.zeros, (0, 0, 0, more_rows)),
    )
    headers = [
        values.half().view(num_panels, _PANEL, num_groups).transpose(1, 2).contiguous()
        for values in pair
    ]
    panels = torch.cat([*(header.view(torch.uint8) for header in headers), steps], dim=2)
    return panels.flatten(), outputs


def packed_pieces(
    group: int, num_outputs: int, weights: Sequence[Tensor | Int4Weight], turn: int, num_bytes: int
) -> Iterator[Tensor]:
    """Give the `packed_bytes` of one linear made of several weights [n_i, K], as consecutive uint8
    pieces of about `num_bytes`. Floating-point weights are quantized. `turn`: see `joined`."""
    parts = [part if isinstance(part, Int4Weight) else quantize(part, group) for part in weights]
    if wrong := {part.group for part in parts} - {group}:
        raise ValueError(f"weights in groups of {min(wrong)} are not packed in groups of {group}")
    codes, scales, zeros = (
        joined([getattr(part, name) for part in parts], turn)
        for name in ("codes", "scales", "zeros")
    )
    step = max(1, num_bytes // (_PANEL * codes.shape[1] // 2)) * _PANEL
    outputs = []
    for begin in range(0, num_outputs, step):
        rows = slice(begin, begin + step)
        panels, scale = packed(Int4Weight(codes[rows], scales[rows], zeros[rows], group))
        outputs.append(scale)
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
