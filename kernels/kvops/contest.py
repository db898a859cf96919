"""Which instruction set multiplies bf16 matrices fastest on this CPU, by measurement.

Only one choice needs it: `avx512_bf16` multiplies bf16 numbers in one instruction, which some CPUs
run at half the rate of fp32's, so that on them `avx512`, which widens the numbers first, is faster.
For fp32 the two are the same, and for int8 the first one has an instruction that the other lacks.
"""

import math
import time
from collections.abc import Callable, Sequence

import torch

from kvops.native import NativeCpu, usable_kernels

CONTENDERS = ("avx512_bf16", "avx512")
"""The first one is the choice wherever the other one is not clearly faster."""

_MARGIN = 1.05
"""How many times as long the first one has to take, so that noise does not decide."""

_LIMIT_S = 0.02
_SHAPES = ((4, 1024, 1024), (64, 1024, 1024))
"""(rows, outputs, inputs): of a decode step, and of a prompt; 2 MB of weights in bf16."""

Timings = Sequence[tuple[float, float]]
"""Seconds that the fastest run of the first one took, and of the second: for each of _SHAPES."""


def contenders() -> tuple[str, str] | None:
    """None: this CPU has at most one of them, so that there is nothing to measure."""
    return CONTENDERS if set(CONTENDERS) <= set(usable_kernels()) else None


def measure(isas: tuple[str, str], limit_s: float = _LIMIT_S) -> Timings:
    """Times bf16 linears on one thread for `limit_s`, after one run of each. Both take turns, so
    that what else runs here disturbs them alike."""
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
    """By the geometric mean of the ratios of their times."""
    ratios = [first / second for first, second in timings]
    return math.prod(ratios) ** (1 / len(ratios)) > _MARGIN


def _linear(isa: str, rows: int, outputs: int, inputs: int) -> Callable[[], None]:
    cpu = NativeCpu(1, isa)
    weights = cpu.pack("bfloat16", torch.ones(outputs, inputs, dtype=torch.bfloat16))
    x = torch.ones(rows, inputs, dtype=torch.bfloat16)
    out = torch.empty(rows, outputs, dtype=torch.bfloat16)
    return lambda: cpu.ops.linear(x, weights, out)
