"""fp32 arithmetic as AMX does it, on exact fractions: an oracle independent of the kernels.

Every operation rounds once, to nearest, ties to even. It reads denormals as 0 and writes 0 for a
denormal; the sign stays. All numbers are finite.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

_SMALLEST = Fraction(2) ** -126
_LARGEST = (2 - Fraction(2) ** -23) * Fraction(2) ** 127


def fma(a: float, b: float, c: float) -> float:
    """a * b + c."""
    a, b, c = _read(a), _read(b), _read(c)
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:  # Only -0 + -0 is -0.
        product = math.copysign(1.0, a) * math.copysign(1.0, b)
        return -0.0 if product < 0 and math.copysign(1.0, c) < 0 else 0.0
    return _rounded(exact)


def tile_dot(x: Sequence[float], weights: Sequence[float]) -> float:
    """The sum of products over K in the order of TDPBF16PS, padded with zeros to a multiple of
    32."""
    padding = [0.0] * (-len(x) % 32)
    x, weights = [*x, *padding], [*weights, *padding]
    total = 0.0
    for begin in range(0, len(x), 32):
        even = odd = 0.0
        for k in range(begin, begin + 32, 2):
            even = fma(x[k], weights[k], even)
            odd = fma(x[k + 1], weights[k + 1], odd)
        total = fma(1.0, fma(1.0, even, odd), total)
    return total


def _read(value: float) -> float:
    return math.copysign(0.0, value) if abs(value) < _SMALLEST else value


def _rounded(exact: Fraction) -> float:
    """`exact` must not be 0."""
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    if abs(exact) < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    value = round(exact / unit) * unit
    sign = math.copysign(1.0, exact)
    if abs(value) < _SMALLEST:
        return sign * 0.0
    return float(value) if abs(value) <= _LARGEST else sign * math.inf
