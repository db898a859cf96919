"""Measures which instruction set computes a model's kernels fastest on this CPU.

CPU flags do not show it: some CPUs multiply bf16 numbers at twice the rate of fp32 with
`avx512_bf16`'s instruction, others at half of it, and on them `avx512`, which widens the numbers
first, is faster.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

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
    """The timed work: linears of one kind, each (outputs, inputs), and attention of one layer."""

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


def same_results(isa: str, other: str) -> bool:
    """Return whether two instruction sets give the same bits in bf16 and int8 linears and in
    attention. The inputs have spread exponents, so that another order of sums shows."""
    cpus = [NativeCpu(1, name) for name in (isa, other)]
    kinds: tuple[Kind, ...] = ("bfloat16", "int8")
    for kind in kinds:
        weight = _spread(95, 333)
        packed = cpus[0].pack(kind, weight)
        for rows in (1, 17, 300):
            x = _spread(rows, 333).bfloat16()
            first, second = torch.empty(2, rows, len(weight))
            for cpu, out in zip(cpus, (first, second), strict=True):
                cpu.ops.linear(x, packed, out)
            if not torch.equal(first, second):
                return False
    shape = ModelShape("bfloat16", (), 4, 2, 64)
    for num_rows, num_queries in ((8, 1), (1, 96)):
        calls = [_Attention(shape, torch.bfloat16, num_rows, num_queries, 96) for _ in cpus]
        for cpu, call in zip(cpus, calls, strict=True):
            call.run(cpu)
        if not torch.equal(calls[0].out, calls[1].out):
            return False
    return True


def _spread(rows: int, columns: int) -> Tensor:
    generator = torch.Generator().manual_seed(rows)
    exponents = 4 * torch.randn(rows, columns, generator=generator)
    return torch.randn(rows, columns, generator=generator) * exponents.exp2()


def _packed(shape: ModelShape) -> list[tuple[PackedLinear, int, int]]:
    """The linears with their outputs and inputs. All instruction sets read the same layout."""
    cpu = NativeCpu()
    sizes = [(min(n, _MOST_OUTPUTS), k) for n, k in shape.linears]
    return [(cpu.pack(shape.kind, torch.randn(n, k)), n, k) for n, k in sizes]


def _kernels(
    cpu: NativeCpu, shape: ModelShape, weights: list[tuple[PackedLinear, int, int]]
) -> dict[str, Callable[[], None]]:
    dtype = torch.float32 if shape.kind == "float32" else torch.bfloat16

    def linears(rows: int) -> Callable[[], None]:
        inputs = [torch.randn(rows, k, dtype=dtype) for _, _, k in weights]
        outputs = [torch.empty(rows, n) for _, n, _ in weights]

        def run() -> None:
            for x, (packed, _, _), out in zip(inputs, weights, outputs, strict=True):
                cpu.ops.linear(x, packed, out)

        return run

    decode = _Attention(shape, dtype, _DECODING_ROWS, 1, _CONTEXT)
    prompt = _Attention(shape, dtype, 1, _PROMPT, _PROMPT)
    return {
        **{f"linears of {rows} rows": linears(rows) for rows in ROWS},
        "decode attention": partial(decode.run, cpu),
        "prompt attention": partial(prompt.run, cpu),
    }


class _Attention:
    """Attention of `num_rows` rows, each with `num_queries` queries and `context` positions; the
    same inputs each time."""

    def __init__(
        self, shape: ModelShape, dtype: torch.dtype, num_rows: int, num_queries: int, context: int
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*size: int) -> Tensor:
            return torch.randn(size, generator=generator).to(dtype)

        num_blocks = context // _BLOCK_SIZE
        heads = shape.num_kv_heads, shape.head_dim
        self._kv = randn(num_rows * num_blocks, 2, _BLOCK_SIZE, *heads)
        self._tables = torch.arange(len(self._kv), dtype=torch.int32).view(num_rows, num_blocks)
        self._q = randn(num_rows * num_queries, shape.num_heads, shape.head_dim)
        self._cu_query_lens = torch.arange(num_rows + 1, dtype=torch.int32) * num_queries
        self._context_lens = torch.full((num_rows,), context, dtype=torch.int32)
        self._scale = shape.head_dim**-0.5
        self.out = torch.empty_like(self._q)

    def run(self, cpu: NativeCpu) -> None:
        cpu.ops.attention(
            *(self._q, self._kv, self._tables, self._cu_query_lens, self._context_lens),
            *(self._scale, 0, self.out),
        )
