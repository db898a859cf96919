"""Layers of experts against the reference on the CPU, their bits in batches, and their speed."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.gpu.check import Check, Machine, Passed, compare, micros, same_bits, worst
from kvops.experts import ExpertWeights

SLACK = 4.0
"""Sums of thousands of products in another order."""
NUM_ROWS = (1, 5, 64, 700)
QWEN3_30B = (128, 8, 2048, 768)
"""Experts, choices of a row, hidden size and width."""
MIN_COPY_SHARE = 0.5
"""Of the bytes per second of a copy, at which 64 rows read the weights of nearly all experts."""


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights_of(
    num: int,
    top_k: int,
    hidden: int = 64,
    wide: int = 40,
    normalizes: bool = True,
    swiglu: bool = False,
) -> ExpertWeights:
    """`swiglu`: with gpt-oss's gate and its biases."""
    biases: dict[str, Any] = {
        "router_bias": randn(num, seed=4),
        "gate_up_bias": randn(num, 2 * wide, seed=5),
        "down_bias": randn(num, hidden, seed=6),
        "alpha": 1.7,
        "limit": 1.5,
    }
    return ExpertWeights(
        router=randn(num, hidden, seed=1) * hidden**-0.5,
        gate_up=randn(num, 2 * wide, hidden, seed=2) * hidden**-0.5,
        down=randn(num, hidden, wide, seed=3) * wide**-0.5,
        top_k=top_k,
        normalizes=normalizes,
        **(biases if swiglu else {}),
    )


_IN_DTYPE = ("gate_up", "down", "gate_up_bias", "down_bias")


def in_dtype(weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
    """The router stays in fp32."""
    return _each(weights, lambda tensor: tensor.to(dtype), *_IN_DTYPE)


def moved(weights: ExpertWeights, device: str) -> ExpertWeights:
    return _each(weights, lambda tensor: tensor.to(device), "router", "router_bias", *_IN_DTYPE)


def _each(weights: ExpertWeights, change: Callable[[Tensor], Tensor], *names: str) -> ExpertWeights:
    tensors = {name: getattr(weights, name) for name in names}
    changed: dict[str, Any] = {name: t if t is None else change(t) for name, t in tensors.items()}
    return replace(weights, **changed)


def checks(machine: Machine) -> Iterator[Check]:
    layers = {
        "of Mixtral's kind": weights_of(8, 2, machine.pick(512, 64), machine.pick(1024, 40)),
        "of gpt-oss's kind": weights_of(
            32, 4, machine.pick(720, 64), machine.pick(720, 40), swiglu=True
        ),
        "many small ones": weights_of(128, 8, machine.pick(512, 64), machine.pick(200, 40)),
    }
    for name, weights in layers.items():
        yield f"equal the reference, {name}", partial(_equals, machine, weights)
    yield "same bits in every batch", lambda: _invariance(machine, layers["many small ones"])
    yield "time of a layer of Qwen3-30B-A3B", lambda: _speed(machine)


def _equals(machine: Machine, weights: ExpertWeights) -> Passed:
    dtypes = machine.pick([torch.float32, torch.bfloat16, torch.float16], [machine.half])
    shares = []
    for dtype in dtypes:
        here = in_dtype(weights, dtype)
        there = moved(here, machine.device)
        for num_rows in machine.pick(NUM_ROWS, (3,)):
            x = randn(num_rows, here.router.shape[1], seed=num_rows).to(dtype)
            found = machine.ops.experts(x.to(machine.device), there)
            shares.append(compare(found, machine.reference.experts(x, here), SLACK))
    return worst(shares, "batches")


def _invariance(machine: Machine, weights: ExpertWeights) -> Passed:
    """The router's choices are given: its linear is cuBLAS's."""
    from kvops.triton.experts import experts

    there = moved(in_dtype(weights, machine.half), machine.device)
    num_rows = machine.pick(700, 9)
    x = randn(num_rows, there.router.shape[1]).to(machine.device, machine.half)
    chosen, shares = there.choose(x.float() @ there.router.T)
    together = experts(x, there, chosen, shares)
    for count in (1, 3, num_rows // 2):
        alone = experts(x[:count], there, chosen[:count], shares[:count])
        same_bits(alone, together[:count], f"{count} of {num_rows} rows")
    return Passed(f"batches of 1, 3, {num_rows // 2} and {num_rows} rows")


def _speed(machine: Machine) -> Passed:
    size = machine.pick(QWEN3_30B, (4, 2, 64, 40))
    weights = moved(in_dtype(weights_of(*size), machine.half), machine.device)
    num_bytes = sum(w.nbytes for w in (weights.gate_up, weights.down) if isinstance(w, Tensor))
    copied, seconds = machine.copy_rate(), dict[str, float]()
    few, many = machine.pick((64, 4096), (2, 3))
    for num_rows in (1, few, many):
        x = randn(num_rows, size[2]).to(machine.device, machine.half)
        seconds[f"{num_rows} rows"] = machine.seconds(partial(machine.ops.experts, x, weights))
    share = num_bytes / seconds[f"{few} rows"] / copied
    text = f"{micros(seconds)}; {few} rows read the weights at {share:.0%} of a copy's rate"
    figures = {**seconds, "share": share}
    return machine.judge(share >= MIN_COPY_SHARE, f"{MIN_COPY_SHARE:.0%}", text, figures)
