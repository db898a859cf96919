"""Four-bit weights: quantization, and packing into the panels of the native kernels.

A group is 32, 64 or 128 consecutive inputs of an output. Its weights share a scale and a zero
point: weight = scale * (code - zero), with codes from 0 to 15.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvops.quantized import PANEL, QuantizedWeight, by_rows, headers, output_scales, padded, stored

_HIGHEST = 15
_STEP = 8
"""The inputs of a step of a panel."""

_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""The parts of a group's range that are tried: a smaller range cuts off outliers but has smaller
steps."""

_FITS = 3
"""How often scale and zero point are fitted to the codes that they give."""

_MOST_ZERO = 2048.0
"""The largest zero point: up to here fp16 has all whole numbers."""

_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""The input of each nibble of a step, from the lowest."""


@dataclass(frozen=True, slots=True)
class Int4Weight(QuantizedWeight):
    """Quantized weights [N, K]. codes: uint8 [N, K]. scales, zeros: fp32 [N, ceil(K / group)]."""

    zeros: Tensor
    group: int

    def dequantized(self) -> Tensor:
        """Return the weights [N, K], fp32."""
        n, k = self.codes.shape
        padded = F.pad(self.codes, (0, -k % self.group)).view(n, -1, self.group)
        weights = (padded - self.zeros[:, :, None]).mul_(self.scales[:, :, None])
        return weights.view(n, -1)[:, :k]

    def packed(self) -> tuple[Tensor, Tensor]:
        group, num_groups = self.group, self.scales.shape[1]
        num_panels = -(-len(self.codes) // PANEL)
        rows = num_panels * PANEL
        codes = padded(self.codes, rows, num_groups * group)
        nibbles = codes.view(num_panels, PANEL, num_groups, -1, _STEP)[..., _ORDER]
        octets = nibbles[..., ::2] | nibbles[..., 1::2] << 4
        steps = octets.permute(0, 2, 3, 1, 4).reshape(num_panels, num_groups, -1)
        scales = padded(self.scales, rows, num_groups)
        outputs = output_scales(scales)
        pair = scales / outputs[:, None], padded(self.zeros, rows, num_groups)
        panels = torch.cat([*(headers(values, num_groups) for values in pair), steps], dim=2)
        return panels.flatten(), outputs


def quantize(weight: Tensor, group: int) -> Int4Weight:
    """Quantize weights [N, K], with the least squared error of some ranges for each group. A group
    with a weight that is not finite has a NaN scale."""
    codes, scales, zeros = by_rows(weight, lambda rows: _quantized(rows, group))
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
        zero = _HIGHEST / 2 - middle / scale
        for _ in range(_FITS):
            scale, zero = _fitted(values, scale, zero)
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
    return stored(scale.flatten(1))[:, :, None], zero.where(scale != 0, 0.0).half().float()
