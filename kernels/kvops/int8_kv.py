"""Keys and values in int8: each head of a position is its D signed bytes and, behind them, an fp32
scale, so that x = scale * byte. An arena in int8 has D + SCALE_BYTES bytes for a head.

See ADR 112.
"""

import torch
from torch import Tensor

SCALE_BYTES = 4


def quantize(x: Tensor) -> Tensor:
    """Quantize heads [..., D] of any float dtype to int8 [..., D + SCALE_BYTES], as the native
    kernels do. A head that is not finite gets bytes of 0 and a scale that is not finite."""
    x = x.float()
    scale = x.abs().amax(dim=-1, keepdim=True) / 127
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 0.0, scale)
    factor = torch.where((scale > 0) & scale.isfinite(), 1 / scale, 0.0)
    values = (torch.where(scale.isfinite(), x, 0.0) * factor).round().to(torch.int8)
    return torch.cat((values, scale.contiguous().view(torch.int8)), dim=-1)


def dequantize(heads: Tensor) -> Tensor:
    """int8 [..., D + SCALE_BYTES] -> fp32 [..., D]."""
    return heads[..., :-SCALE_BYTES].float() * scales(heads)


def scales(heads: Tensor) -> Tensor:
    """The scales of heads, fp32 [..., 1]."""
    return heads[..., -SCALE_BYTES:].contiguous().view(torch.float32)
