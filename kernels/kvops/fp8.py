"""Numbers in eight-bit floating point (e4m3): weights, and the heads of an arena in fp8."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvops.quantized import QuantizedWeight

GROUP = 128
_LARGEST = 448.0
_LEAST_SCALE = 1e-12


@dataclass(frozen=True, slots=True)
class Float8Weight(QuantizedWeight):
    """Quantized weights [N, K]. codes: the bits of e4m3 numbers, uint8 [N, K]. scales: fp32
    [N, ceil(K / 128)]."""

    def dequantized(self) -> Tensor:
        """Return the weights [N, K], rounded once to bf16."""
        scales = self.scales.repeat_interleave(GROUP, dim=1)[:, : self.codes.shape[1]]
        return (self.codes.view(torch.float8_e4m3fn).float() * scales).bfloat16()


def saturated(heads: Tensor) -> Tensor:
    """Return heads as an arena in fp8 has them: the nearest e4m3 numbers, without a scale. Numbers
    beyond the largest one, 448, become it; what is not finite becomes NaN."""
    wide = heads.float()
    largest = wide.clamp(-_LARGEST, _LARGEST)
    return torch.where(wide.isfinite(), largest, torch.nan).to(torch.float8_e4m3fn)


def rounded(x: Tensor, group: int = 0) -> Tensor:
    """Return x [T, K] in fp32, rounded to e4m3 with a scale for each row, or for each `group` of a
    row's inputs."""
    wide = x.float().view(len(x), -1, group or x.shape[1])
    scales = (wide.abs().amax(2, keepdim=True) / _LARGEST).clamp(min=_LEAST_SCALE)
    return ((wide / scales).to(torch.float8_e4m3fn).float() * scales).view(x.shape)
