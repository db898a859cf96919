"""The arithmetic of draws, written out: the same bits on every CPU.

`kernels/csrc/sampling/softmax.h` computes the same, operation for operation. Each operation is
rounded by itself, in fp32, without fused multiply-adds and libraries. Probabilities are whole
numbers, so that their sums are exact in any order.
"""

from functools import lru_cache

import torch
from torch import Tensor

WEIGHT_BITS = 40
"""The likeliest token weighs 2 ** 40."""

SMALLEST_TEMPERATURE = 1e-30
"""A smaller fp32 temperature may round to 0."""

_LEAST = -30.0  # e^-30 of the largest weight rounds to 0
_TO_WHOLE = 1.5 * 2.0**23 + WEIGHT_BITS
"""The sum of this number and a small number x has the whole number nearest to x, plus WEIGHT_BITS,
in its lowest bits."""
_LOG2_E = 1.44269504088896341
_LN_2 = 0.693147180559945309
_EXP2 = (0.00132647273, 0.00967151299, 0.0555073358, 0.240222424, 0.693147004, 1.0)
"""The factors of the minimax polynomial of 2^f for f from -1/2 to 1/2 that is exact at 0."""
_ATANH = (1 / 11, 1 / 9, 1 / 7, 1 / 5, 1 / 3)
_SQRT_HALF_BITS = 0x3F3504F3


def weights(scaled: Tensor) -> Tensor:
    """The weights of scaled logits (fp32, at most 0): floor(2^40 * e^scaled), int64 of at most 24
    significant bits. The relative error of e^scaled is 1e-7, plus one ulp of `scaled`."""
    binary = scaled.clamp(min=_LEAST) * _LOG2_E
    shifted = binary + _TO_WHOLE
    power = _polynomial(binary - (shifted - _TO_WHOLE), _EXP2)
    # The lowest bits of `shifted` go where the exponent is; its other bits are shifted out.
    return (power.view(torch.int32) + (shifted.view(torch.int32) << 23)).view(torch.float32).long()


def exponentials(numbers: Tensor) -> Tensor:
    """Exponential numbers -log(1 - u), fp32, of uniform numbers u, fp32 in (0, 1)."""
    is_small = numbers < 0.25
    m, k = _halved(1.0 - numbers)
    numerator = torch.where(is_small, numbers, 1.0 - m)
    denominator = torch.where(is_small, 2.0 - numbers, 1.0 + m)
    return _twice_atanh(numerator / denominator, torch.where(is_small, 0.0, -k))


def log(x: Tensor) -> Tensor:
    """The natural logarithm of fp32 numbers from 0 on; it is -inf at 0."""
    m, k = _halved(x)
    return torch.where(x > 0, -_twice_atanh((1.0 - m) / (1.0 + m), -k), float("-inf"))


@lru_cache
def least_scaled(min_p: float) -> float:
    """The least scaled logit that min_p leaves; the largest is 0."""
    return float(log(torch.tensor([min_p])))


def _halved(x: Tensor) -> tuple[Tensor, Tensor]:
    """m and k with x = m * 2^k, and m from the square roots of 1/2 to 2."""
    bits = x.contiguous().view(torch.int32)
    k = (bits - _SQRT_HALF_BITS) >> 23
    return (bits - (k << 23)).view(torch.float32), k.float()


def _twice_atanh(z: Tensor, k: Tensor) -> Tensor:
    """2 atanh(z) + k ln 2."""
    square, twice = z * z, z + z
    return k * _LN_2 + (twice + twice * (square * _polynomial(square, _ATANH)))


def _polynomial(x: Tensor, factors: tuple[float, ...]) -> Tensor:
    """Compute a polynomial by Horner's rule. The first factor belongs to the highest power."""
    value = torch.full_like(x, factors[0])
    for factor in factors[1:]:
        value = value * x + factor
    return value
