"""Every operation but attention against the reference on the CPU, and its bits in batches."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from bench.gpu.check import Check, Machine, Passed, compare, micros, same_bits, worst
from kvops import Backend
from kvops.step import HeadNorms


@dataclass(frozen=True, slots=True)
class Inputs:
    """The inputs of T tokens: x, y [T, n]; q, k [T, heads, D]; cos, sin [T, D / 2]
    fp32."""

    x: Tensor
    y: Tensor
    q: Tensor
    k: Tensor
    cos: Tensor
    sin: Tensor
    weight: Tensor
    matrix: Tensor

    @classmethod
    def of(cls, num_tokens: int, size: int, dtype: torch.dtype) -> "Inputs":
        draw = torch.Generator().manual_seed(num_tokens)

        def randn(*shape: int) -> Tensor:
            return torch.randn(shape, generator=draw)

        angles = randn(num_tokens, 32)
        return cls(
            randn(num_tokens, size).to(dtype),
            randn(num_tokens, size).to(dtype),
            randn(num_tokens, 6, 64).to(dtype),
            randn(num_tokens, 2, 64).to(dtype),
            angles.cos(),
            angles.sin(),
            randn(size).to(dtype),
            (randn(size // 2, size) * size**-0.5).to(dtype),
        )

    def to(self, device: str, rows: slice = slice(None)) -> "Inputs":
        """Copies, of some tokens."""
        names = ("x", "y", "q", "k", "cos", "sin")
        moved = {name: getattr(self, name)[rows].clone().to(device) for name in names}
        weights = {"weight": self.weight.to(device), "matrix": self.matrix.to(device)}
        return replace(self, **moved, **weights)


def _add_norm(ops: Backend, one: Inputs) -> Tensor:
    normed = ops.add_rms_norm(one.x, one.y, one.weight, 1e-6)
    return torch.cat([normed, one.y], dim=1)


def _store_heads(ops: Backend, one: Inputs) -> Tensor:
    """The queries, and what is stored of each token."""
    num_tokens = len(one.x)
    arena = torch.zeros(-(-num_tokens // 16), 2, 16, 2, 64, dtype=one.x.dtype, device=one.x.device)
    slots = torch.arange(num_tokens, device=one.x.device)
    norms = HeadNorms(one.weight[:64], one.weight[:64], 1e-6)
    q = ops.store_heads(arena, one.q, one.k, one.k.clone(), slots, norms, (one.cos, one.sin))
    return torch.cat([q, arena.transpose(1, 2).flatten(0, 1)[:num_tokens].flatten(1, 2)], dim=1)


Operation = Callable[[Backend, Inputs], Tensor]

OPERATIONS: dict[str, Operation] = {
    "rms_norm": lambda ops, one: ops.rms_norm(one.x, one.weight, 1e-6),
    "add_rms_norm": _add_norm,
    "store_heads": _store_heads,
    "silu_mul": lambda ops, one: ops.silu_mul(one.x, one.y),
    "linear": lambda ops, one: ops.linear(one.x, one.matrix),
}


_LINEAR_SLACK = 4.0
"""A sum of 4,096 products in another order has a larger error than a tolerance for rounding."""


def checks(machine: Machine) -> Iterator[Check]:
    for name, call in OPERATIONS.items():
        yield f"{name} equals the reference", partial(equals_reference, machine, call)
        if name != "linear":
            yield f"{name}: same bits in every batch", partial(invariance, machine, call)
    yield "linear: bits in batches (cuBLAS promises none)", lambda: _linear_bits(machine)
    yield "linears of any mix of adapters, in two launches", lambda: _low_ranks(machine)


def equals_reference(machine: Machine, call: Operation) -> Passed:
    dtypes = machine.pick([torch.float32, torch.bfloat16, torch.float16], [machine.half])
    shapes = machine.pick([(1, 4096), (300, 4096), (7, 1000)], [(3, 96)])
    slack = _LINEAR_SLACK if call is OPERATIONS["linear"] else 1.0
    shares = []
    for dtype, (num_tokens, size) in itertools.product(dtypes, shapes):
        inputs = Inputs.of(num_tokens, size, dtype)
        expected = call(machine.reference, inputs.to("cpu"))
        shares.append(compare(call(machine.ops, inputs.to(machine.device)), expected, slack))
    return worst(shares, "shapes and dtypes")


def invariance(machine: Machine, call: Operation) -> Passed:
    inputs = Inputs.of(machine.pick(200, 5), machine.pick(4096, 96), machine.half)
    together = call(machine.ops, inputs.to(machine.device))
    tokens = machine.pick((0, 1, 100, 199), (0, 1, 2, 4))
    for token in tokens:
        one = slice(token, token + 1)
        alone = call(machine.ops, inputs.to(machine.device, one))
        same_bits(alone, together[one], f"token {token} alone")
    return Passed(f"{len(tokens)} tokens alone")


def _linear_bits(machine: Machine) -> Passed:
    """Reported, not judged: law 10 binds on CPUs."""
    ops, inputs = machine.ops, Inputs.of(machine.pick(256, 5), machine.pick(4096, 96), machine.half)
    there = inputs.to(machine.device)
    together = ops.linear(there.x, there.matrix)
    sizes = [n for n in (1, 2, 8, 64, 128) if n <= len(there.x)]
    other = [
        n for n in sizes if not torch.equal(ops.linear(there.x[:n], there.matrix), together[:n])
    ]
    detail = f"batches of {', '.join(map(str, other))} rows differ" if other else "no batch differs"
    return Passed(detail, {"differing_batches": len(other)})


def _low_ranks(machine: Machine) -> Passed:
    """A quarter of the rows has no adapter, the others have three of different ranks, beside two
    linears of the rows of each adapter. Their time is reported, and the time if no row has any."""
    ops, num_rows, size = machine.ops, machine.pick(64, 5), machine.pick(4096, 96)
    there = Inputs.of(num_rows, size, machine.half).to(machine.device)
    draw = torch.Generator().manual_seed(1)
    found = ops.linear(there.x, there.matrix)
    expected = found.clone()
    addresses = torch.zeros(num_rows, dtype=torch.int64, device=machine.device)
    kept: list[Tensor] = []
    for number, rank in enumerate((16, 48, 64), 1):
        down, up = torch.randn(rank, size, generator=draw), torch.randn(size // 2, rank)
        pair = [(m * m.shape[1] ** -0.5).to(there.x) for m in (down, up)]
        kept += [*pair, torch.tensor([[*(m.data_ptr() for m in pair), rank]]).to(machine.device)]
        rows = slice(number * num_rows // 4, (number + 1) * num_rows // 4)
        expected[rows] += ops.linear(ops.linear(there.x[rows], pair[0]), pair[1])
        addresses[rows] = kept[-1].data_ptr()
    call = partial(ops.add_low_rank, x=there.x, linear=0, max_rank=64)
    call(found, tables=addresses)
    error = compare(found, expected.cpu(), _LINEAR_SLACK)
    mixed = machine.seconds(partial(call, found, tables=addresses))
    none = machine.seconds(partial(call, found, tables=torch.zeros_like(addresses)))
    times = micros({f"{num_rows} rows": mixed, "without adapters": none})
    return worst([error], f"batch; {times}")
