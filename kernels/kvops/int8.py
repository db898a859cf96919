"""Packing of weights that are already quantized to eight bits. The kernels quantize and pack
floating-point weights themselves."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from kvops.int4 import joined

_PANEL = 32
_STEP = 4
"""The inputs of a step of a panel."""


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Quantized weights [N, K]: weight = scale * code. codes: int8 [N, K]. scales: fp32 [N]."""

    codes: Tensor
    scales: Tensor

    def dequantized(self) -> Tensor:
        """Return the weights [N, K], fp32."""
        return self.scales[:, None] * self.codes


def packed_pieces(
    num_outputs: int, weights: Sequence[Int8Weight], turn: int, num_bytes: int
) -> Iterator[Tensor]:
    """Give the `packed_bytes` of one linear made of several weights [n_i, K], as consecutive uint8
    pieces of about `num_bytes`. `turn`: see `joined`."""
    codes = joined([weight.codes for weight in weights], turn)
    scales = joined([weight.scales for weight in weights], turn)
    step = max(1, num_bytes // (_PANEL * codes.shape[1])) * _PANEL
    for begin in range(0, num_outputs, step):
        yield _panels(codes[begin : begin + step])
    padding = (0, -num_outputs % _PANEL)
    sums = codes.sum(1, dtype=torch.int32)
    yield F.pad(scales.float(), padding).view(torch.uint8)
    yield F.pad(sums, padding).view(torch.uint8)


def _panels(codes: Tensor) -> Tensor:
    n, k = codes.shape
    padded = F.pad(codes, (0, -k % _STEP, 0, -n % _PANEL))
    panels = padded.view(-1, _PANEL, padded.shape[1] // _STEP, _STEP).transpose(1, 2)
    return panels.contiguous().view(torch.uint8).flatten()
