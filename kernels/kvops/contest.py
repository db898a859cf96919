"""Measures which instruction set computes a model's kernels fastest on this CPU.

CPU flags do not show it: some CPUs multiply bf16 numbers at twice the rate of fp32 with
`avx512_bf16`'s instruction, others at half of it, and on them `avx512`, which widens the numbers
first, is faster. See ADR 110.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from kvops.native import Kind, NativeCpu, PackedLinear, usable_kernels

ROWS = (1, 8, 16, 512)
"""The rows of the linears that are timed: decode steps and a prompt."""

_MARGIN = 1.05
"""A set may take this many times as long as the fastest one; with less, noise could decide."""

_LIMIT_S = 0.3
_MOST_OUTPUTS = 1024
"""The outputs of a linear that are timed. More take longer, but at the same rate."""

_BLOCK_SIZE = 16
_CONTEXT = 512
_DECODING_ROWS = 8
_PROMPT = 256

Timings = Mapping[str, Sequence[float]]
"""For each kernel: the seconds of the fastest run with each instruction set."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What is timed: linears of one kind, each (outputs, inputs), and attention of one layer."""

    kind: Kind
    linears: tuple[tuple[int, int], ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int


def contenders() -> tuple[str, ...]:
    """Return the sets that are worth timing: all of this CPU's but the portable one, which never
    wins. With fewer than two there is nothing to measure."""
    return tuple(isa for isa in usable_kernels() if isa != "portable")


def measure(isas: Sequence[str], shape: ModelShape, limit_s: float = _LIMIT_S) -> Timings:
    """Time the kernels on one thread for about `limit_s`, but at least two runs of each. The sets
    take turns, so that other load on this machine slows them equally."""
    weights = _packed(shape)
    kernels = [_kernels(NativeCpu(1, isa), shape, weights) for isa in isas]
    fastest = {name: [math.inf] * len(isas) for name in kernels[0]}
    order = list(range(len(isas)))
    end = time.perf_counter() + limit_s
    num_rounds = 0
    while num_rounds < 2 or time.perf_counter() < end:
        num_rounds += 1
        order.reverse()
        for name, seconds in fastest.items():
            for turn in order:
                began = time.perf_counter()
                kernels[turn][name]()
                seconds[turn] = min(seconds[turn], time.perf_counter() - began)
    return fastest


def winner(isas: Sequence[str], timings: Timings) -> str:
    """Return the first set that is about as fast as the fastest one, by the geometric mean of its
    times."""
    columns = zip(*timings.values(), strict=True)
    means = [math.prod(times) ** (1 / len(times)) for times in columns]
    limit = min(means) * _MARGIN
    return next(isa for isa, mean in zip(isas, means, strict=True) if mean <= limit)


def _packed(shape: ModelShape) -> list[tuple[PackedLinear, int, int]]:
    """The linears with their outputs and inputs. All instruction sets read the same layout."""
    cpu = NativeCpu()
    sizes = [(min(n, _MOST_OUTPUTS), k) for n, k in shape.linears]
    return [(cpu.pack(shape.kind, torch.randn(n, k)), n, k) for n, k in sizes]


def _kernels(
    cpu: NativeCpu, shape: ModelShape, weights: list[tuple[PackedLinear, int, int]]
) -> dict[str, Callable[[], None]]:
    def linears(rows: int) -> Callable[[], None]:
        inputs = [torch.randn(rows, k, dtype=dtype) for _, _, k in weights]
        outputs = [torch.empty(rows, n) for _, n, _ in weights]

        def run() -> None:
            for x, (packed, _, _), out in zip(inputs, weights, outputs, strict=True):
                cpu.ops.linear(x, packed, out)

        return run

    dtype = torch.float32 if shape.kind == "float32" else torch.bfloat16
    return {
        **{f"linears of {rows} rows": linears(rows) for rows in ROWS},
        "decode attention": _attention(cpu, shape, dtype, _DECODING_ROWS, 1, _CONTEXT),
        "prompt attention": _attention(cpu, shape, dtype, 1, _PROMPT, _PROMPT),
    }


def _attention(
    cpu: NativeCpu,
    shape: ModelShape,
    dtype: torch.dtype,
    num_rows: int,
    num_queries: int,
    context: int,
) -> Callable[[], None]:
    """Attention of `num_rows` rows, each with `num_queries` queries and `context` positions."""
    num_blocks = context // _BLOCK_SIZE
    kv = torch.randn(
        num_rows * num_blocks, 2, _BLOCK_SIZE, shape.num_kv_heads, shape.head_dim, dtype=dtype
    )
    tables = torch.arange(len(kv), dtype=torch.int32).view(num_rows, num_blocks)
    q = torch.randn(num_rows * num_queries, shape.num_heads, shape.head_dim, dtype=dtype)
    cu_query_lens = torch.arange(num_rows + 1, dtype=torch.int32) * num_queries
    context_lens = torch.full((num_rows,), context, dtype=torch.int32)
    scale, out = shape.head_dim**-0.5, torch.empty_like(q)
    return lambda: cpu.ops.attention(q, kv, tables, cu_query_lens, context_lens, scale, 0, out)
