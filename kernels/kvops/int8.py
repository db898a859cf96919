"""Eight-bit weights: quantization, and packing into the panels of the native kernels.

A group is 16 or 32 consecutive inputs of an output: weight = scale * code, with codes from -128 to
127.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvops.quantized import PANEL, QuantizedWeight, by_rows, headers, output_scales, padded, stored

GROUP = 32
"""The usual group."""

_LARGEST = 127
_STEP = 4
"""The inputs of a step of a panel."""

_ORDER = [0, 2, 1, 3]
"""The input of each byte of a step."""


@dataclass(frozen=True, slots=True)
class Int8Weight(QuantizedWeight):
    """Quantized weights [N, K]. codes: int8 [N, K]. scales: fp32 [N, ceil(K / group)]."""

    group: int = GROUP

    def dequantized(self) -> Tensor:
        """Return the weights [N, K], fp32."""
        k = self.codes.shape[1]
        return self.scales.repeat_interleave(self.group, dim=1)[:, :k] * self.codes

    def regrouped(self, group: int) -> "Int8Weight":
        """The same weights in groups of this size, which divides the present one."""
        num_groups = -(-self.codes.shape[1] // group)
        scales = self.scales.repeat_interleave(self.group // group, dim=1)[:, :num_groups]
        return Int8Weight(self.codes, scales, group)

    def packed(self) -> tuple[Tensor, Tensor]:
        n, k = self.codes.shape
        num_panels, runs = -(-n // PANEL), -(-k // (2 * self.group))
        codes = padded(self.codes, num_panels * PANEL, runs * 2 * self.group)
        steps = codes.view(num_panels, PANEL, runs, -1, _STEP)[..., _ORDER]
        steps = steps.permute(0, 2, 3, 1, 4).reshape(num_panels, runs, -1).view(torch.uint8)
        outputs = output_scales(padded(self.scales, num_panels * PANEL, self.scales.shape[1]))
        scales = padded(self.scales, num_panels * PANEL, runs * 2)
        panels = torch.cat([headers(scales / outputs[:, None], runs), steps], dim=2)
        return panels.flatten(), outputs


def quantize(weight: Tensor, group: int = GROUP) -> Int8Weight:
    """Quantize weights [N, K] with scale = largest |weight| of a group / 127. A group with a weight
    that is not finite has a NaN scale."""

    def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
        n, k = weight.shape
        values = padded(weight, n, -(-k // group) * group).view(n, -1, group)
        largest = values.abs().amax(2)
        scales = stored(torch.where(largest.isfinite(), largest / _LARGEST, torch.nan))
        codes = (values / scales[:, :, None]).round_().clamp_(-_LARGEST, _LARGEST)
        return codes.nan_to_num_(0.0).to(torch.int8).view(n, -1)[:, :k], scales

    codes, scales = by_rows(weight, quantized)
    return Int8Weight(codes, scales, group)
