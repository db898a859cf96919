"""Measures which instruction set multiplies bf16 matrices fastest on this CPU.

Only the choice between the sets with AVX-512 needs a measurement. `avx512_bf16` multiplies bf16
numbers with one instruction, `amx` whole tiles of them. Some CPUs run the first of these at half
the rate of fp32 multiplication; on them `avx512`, which widens the numbers first, is faster. For
fp32 the three are equally fast, and for int8 the best set that this CPU has is the fastest one.
"""

import math
import time
from collections.abc import Callable, Sequence

import torch

from kvops.native import NativeCpu, usable_kernels

CONTENDERS = ("amx", "avx512_bf16", "avx512")
"""The first one that this CPU has is chosen, unless another one is clearly faster."""

_MARGIN = 1.05
"""A contender may take this many times as long as the fastest one; with less, noise could
decide."""

_LIMIT_S = 0.02
_SHAPES = ((4, 1024, 1024), (64, 1024, 1024))
"""(rows, outputs, inputs) of a decode step and of a prompt; the weights take 2 MB in bf16."""

Timings = Sequence[Sequence[float]]
"""For each of `_SHAPES`: the seconds of the fastest run of each contender."""


def contenders() -> tuple[str, ...]:
    """Return the contenders that this CPU has; with fewer than two there is nothing to measure."""
    return tuple(isa for isa in CONTENDERS if isa in usable_kernels())


def measure(isas: Sequence[str], limit_s: float = _LIMIT_S) -> Timings:
    """Time bf16 linears on one thread for `limit_s`, after one run of each. The contenders take
    turns, so that other load on this machine slows them equally."""
    linears = [[_linear(isa, *shape) for isa in isas] for shape in _SHAPES]
    fastest = [[math.inf] * len(isas) for _ in _SHAPES]
    order = list(range(len(isas)))
    end = None
    while end is None or time.perf_counter() < end:
        order.reverse()
        for runs, seconds in zip(linears, fastest, strict=True):
            for turn in order:
                began = time.perf_counter()
                runs[turn]()
                seconds[turn] = min(seconds[turn], time.perf_counter() - began)
        end = end or time.perf_counter() + limit_s
    return fastest


def winner(isas: Sequence[str], timings: Timings) -> str:
    """Return the first contender that is about as fast as the fastest one, by the geometric mean of
    its times."""
    means = [math.prod(times) ** (1 / len(times)) for times in zip(*timings, strict=True)]
    limit = min(means) * _MARGIN
    return next(isa for isa, mean in zip(isas, means, strict=True) if mean <= limit)


def _linear(isa: str, rows: int, outputs: int, inputs: int) -> Callable[[], None]:
    cpu = NativeCpu(1, isa)
    weights = cpu.pack("bfloat16", torch.ones(outputs, inputs, dtype=torch.bfloat16))
    x = torch.ones(rows, inputs, dtype=torch.bfloat16)
    out = torch.empty(rows, outputs, dtype=torch.bfloat16)
    return lambda: cpu.ops.linear(x, weights, out)
