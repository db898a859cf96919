"""Four-bit floating point (e2m1) in blocks of 32 inputs with a power of two each: MXFP4."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvops.quantized import QuantizedWeight

GROUP = 32
_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_EXPONENT_BIAS = 127


@dataclass(frozen=True, slots=True)
class Float4Weight(QuantizedWeight):
    """Quantized weights [N, K]. codes: uint8 [N, K], four bits each. scales: the exponents of the
    blocks, with a bias of 127, uint8 [N, ceil(K / 32)]."""

    def dequantized(self) -> Tensor:
        """Return the weights [N, K] in bf16, which has all of them."""
        exponents = self.scales.to(torch.int32) - _EXPONENT_BIAS
        exponents = exponents.repeat_interleave(GROUP, dim=1)[:, : self.codes.shape[1]]
        return torch.ldexp(values(self.codes), exponents).bfloat16()


def values(codes: Tensor) -> Tensor:
    """The numbers of codes, fp32, without the exponents of their blocks."""
    table = torch.tensor([*_VALUES, *(-value for value in _VALUES)], device=codes.device)
    return table[codes.long()]
