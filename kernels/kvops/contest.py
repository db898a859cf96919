"""Measures which instruction set multiplies bf16 matrices fastest on this CPU.

Only the choice between `avx512_bf16` and `avx512` needs a measurement. `avx512_bf16` multiplies
bf16 numbers with one instruction. Some CPUs run that instruction at half the rate of fp32
multiplication; on them `avx512`, which widens the numbers first, is faster. For fp32 the two are
equally fast, and for int8 `avx512_bf16` has an instruction that `avx512` lacks.
"""

import math
import time
from collections.abc import Callable, Sequence

import torch

from kvops.native import NativeCpu, usable_kernels

CONTENDERS = ("avx512_bf16", "avx512")
"""The first one is chosen unless the second one is clearly faster."""

_MARGIN = 1.05
"""The second one is chosen if the first one takes this many times as long; with less, noise could
decide."""

_LIMIT_S = 0.02
_SHAPES = ((4, 1024, 1024), (64, 1024, 1024))
"""(rows, outputs, inputs) of a decode step and of a prompt; the weights take 2 MB in bf16."""

Timings = Sequence[tuple[float, float]]
"""For each of `_SHAPES`: the seconds of the fastest run of the first contender, and of the
second."""


def contenders() -> tuple[str, str] | None:
    """Return both contenders, or None if this CPU lacks one: there is nothing to measure then."""
    return CONTENDERS if set(CONTENDERS) <= set(usable_kernels()) else None


def measure(isas: tuple[str, str], limit_s: float = _LIMIT_S) -> Timings:
    """Time bf16 linears on one thread for `limit_s`, after one run of each. The contenders take
    turns, so that other load on this machine slows them equally."""
    linears = [[_linear(isa, *shape) for isa in isas] for shape in _SHAPES]
    fastest = [[math.inf, math.inf] for _ in _SHAPES]
    order = [0, 1]
    end = None
    while end is None or time.perf_counter() < end:
        order.reverse()
        for runs, seconds in zip(linears, fastest, strict=True):
            for turn in order:
                began = time.perf_counter()
                runs[turn]()
                seconds[turn] = min(seconds[turn], time.perf_counter() - began)
        end = end or time.perf_counter() + limit_s
    return [(first, second) for first, second in fastest]


def second_is_faster(timings: Timings) -> bool:
    """Whether the second contender is clearly faster, by the geometric mean of the time ratios."""
    ratios = [first / second for first, second in timings]
    return math.prod(ratios) ** (1 / len(ratios)) > _MARGIN


def _linear(isa: str, rows: int, outputs: int, inputs: int) -> Callable[[], None]:
    cpu = NativeCpu(1, isa)
    weights = cpu.pack("bfloat16", torch.ones(outputs, inputs, dtype=torch.bfloat16))
    x = torch.ones(rows, inputs, dtype=torch.bfloat16)
    out = torch.empty(rows, outputs, dtype=torch.bfloat16)
    return lambda: cpu.ops.linear(x, weights, out)
