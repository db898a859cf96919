"""Linears with quantized weights against the reference, their bits in batches and in CUDA graphs,
and their speed beside a copy and beside cuBLAS in bf16."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from bench.gpu import experts
from bench.gpu.check import Check, Machine, Passed, compare, micros, same_bits, worst
from bench.gpu.experts import randn
from kvops import fp8
from kvops.fp4 import Float4Weight
from kvops.fp8 import Float8Weight
from kvops.grouped import GroupedWeight, like, pack
from kvops.quantized import Kind, group_of
from kvops.triton.float8 import has_fp8

KINDS: tuple[Kind, ...] = (
    *("int4-32", "int4-64", "int4-128", "int8", "int8-16", "fp8", "fp8-128", "mxfp4"),
)
SHAPES = ((520, 2200), (528, 2304), (64, 4096))
NUM_ROWS = (1, 16, 40, 200, 300)
SLACK = 4.0
"""A sum in another order has a larger error than a tolerance for rounding."""
QWEN3_8B = ((6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288))
"""Outputs and inputs of the linears of a layer."""
MIN_COPY_SHARE = 0.5
"""Of the bytes per second of a copy, at which one row reads the weights."""
MAX_PROMPT_TIME = 1.5
"""Of cuBLAS's time with weights in bf16, for 2,048 rows."""


def checks(machine: Machine) -> Iterator[Check]:
    for kind in machine.pick(KINDS, KINDS[::2]):
        yield f"{kind} equals the reference", partial(_equals, machine, kind)
    yield "experts equal the reference", lambda: _experts(machine)
    yield "same bits beside any rows of a class", lambda: _invariance(machine)
    yield "same bits in a CUDA graph", lambda: _graph(machine)
    for kind in ("int4-128", "int8", "fp8", "fp8-128", "mxfp4"):
        yield f"speed of a layer of Qwen3-8B's shape, {kind}", partial(_speed, machine, kind)


def packed(kind: Kind, n: int, k: int) -> GroupedWeight:
    """Random weights; the scales of fp8 differ a hundredfold, and some of its codes are subnormal
    numbers."""
    if kind == "mxfp4":
        draw = torch.Generator().manual_seed(n)
        codes = torch.randint(16, (n, k), generator=draw, dtype=torch.uint8)
        exponents = torch.randint(118, 124, (n, -(-k // 32)), generator=draw, dtype=torch.uint8)
        return pack(kind, [Float4Weight(codes, exponents)])
    weight = randn(n, k) * k**-0.5
    if not kind.startswith("fp8"):
        return pack(kind, [weight])
    num_scales = 1 if kind == "fp8" else -(-k // 128)
    scales = (randn(n, num_scales, seed=1).abs() + 0.01) * k**-0.5
    scales = scales.repeat(1, -(-k // 128) // num_scales)
    relative = (weight / scales.repeat_interleave(128, 1)[:, :k]).clamp(-448, 448)
    codes = relative.to(torch.float8_e4m3fn)
    return pack(kind, [Float8Weight(codes.view(torch.uint8), scales)])


def moved(weight: GroupedWeight, device: str) -> GroupedWeight:
    names = ("codes", "scales", "outputs")
    return replace(weight, **{name: getattr(weight, name).to(device) for name in names})


def _equals(machine: Machine, kind: Kind) -> Passed:
    shares = []
    in_fp8 = kind.startswith("fp8") and has_fp8(torch.device(machine.device))
    for n, k in machine.pick(SHAPES, ((70, 200),)):
        weight = packed(kind, n, k)
        there, bias = moved(weight, machine.device), randn(n, seed=1)
        for dtype in machine.pick([torch.bfloat16, torch.float16, torch.float32], [machine.half]):
            for num_rows in machine.pick(NUM_ROWS, (3, 257)):
                x = randn(num_rows, k, seed=num_rows).to(dtype)
                arguments = x.to(machine.device), there, bias.to(machine.device, dtype)
                is_multiple = not (n % 16 or k % 16)
                if in_fp8 and is_multiple and dtype == torch.bfloat16 and num_rows > 16:
                    x = fp8.rounded(x, group_of(kind) if "-" in kind else 0).to(dtype)
                expected = machine.reference.linear(x, weight, bias.to(dtype))
                shares.append(compare(machine.ops.linear(*arguments), expected, SLACK))
    return worst(shares, "batches")


def _example(machine: Machine, num_rows: int) -> tuple[Tensor, GroupedWeight]:
    n, k = machine.pick((4096, 4096), (64, 1100))
    weight = pack("int4-128", [randn(n, k) * k**-0.5])
    x = randn(num_rows, k).to(machine.device, machine.half)
    return x, moved(weight, machine.device)


def _experts(machine: Machine) -> Passed:
    num, width, hidden = machine.pick((16, 768, 1024), (3, 40, 64))
    plain, shares = experts.weights_of(num, 2, hidden, width), []
    kinds: list[tuple[Kind, Kind]] = [
        ("int4-32", "int8"),
        ("fp8-128", "int4-128"),
        ("mxfp4", "mxfp4"),
    ]
    for gate_up, down in kinds:
        pair = packed(gate_up, num * 2 * width, hidden), packed(down, num * hidden, width)
        here = replace(plain, gate_up=pair[0], down=pair[1])
        there = replace(
            experts.moved(plain, machine.device),
            gate_up=moved(pair[0], machine.device),
            down=moved(pair[1], machine.device),
        )
        for num_rows in machine.pick((1, 100, 1000), (5,)):
            x = randn(num_rows, hidden, seed=num_rows).to(machine.half)
            found = machine.ops.experts(x.to(machine.device), there)
            shares.append(compare(found, machine.reference.experts(x, here), experts.SLACK))
    return worst(shares, "batches")


def _random(kind: Kind, n: int, k: int, device: str) -> GroupedWeight:
    tensors = {
        name: torch.randint(127, one.shape, device=device).to(one.dtype)
        for name, one in like(kind, n, k).items()
    }
    return GroupedWeight(kind, k, **tensors)


def _invariance(machine: Machine) -> Passed:
    x, weight = _example(machine, machine.pick(256, 20))
    for low, high in machine.pick(((1, 16), (17, 64), (65, 256)), ((1, 16), (17, 20))):
        alone, together = (machine.ops.linear(x[:number], weight) for number in (low, high))
        same_bits(alone, together[:low], f"{low} of {high} rows")
    return Passed("up to 16, 64 and 256 rows")


def _graph(machine: Machine) -> Passed:
    machine.needs_gpu("CUDA graphs")
    ops = machine.ops
    for num_rows in (1, 40):
        x, weight = _example(machine, num_rows)
        ops.linear(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = ops.linear(x, weight)
        x.copy_(x.flip(0) * 2)
        graph.replay()
        same_bits(out, ops.linear(x, weight), f"{num_rows} rows")
    return Passed("1 and 40 rows")


def _speed(machine: Machine, kind: Kind) -> Passed:
    """Of the four linears together, with random codes."""
    copied, seconds, num_bytes = machine.copy_rate(), dict[str, float](), 0
    for n, k in machine.pick(QWEN3_8B, ((64, 256),)):
        weight = _random(kind, n, k, machine.device)
        num_bytes += weight.codes.nbytes + weight.scales.nbytes
        plain = torch.zeros(n, k, dtype=machine.half, device=machine.device)
        for num_rows in machine.pick((1, 16, 64, 256, 2048), (1, 257)):
            x = randn(num_rows, k).to(machine.device, machine.half)
            for name, one in ((f"{num_rows}", weight), (f"{num_rows} in 16 bits", plain)):
                spent = machine.seconds(partial(machine.ops.linear, x, one))
                seconds[name] = seconds.get(name, 0.0) + spent
    share = num_bytes / seconds["1"] / copied
    text = f"rows {micros(seconds)}; 1 row reads at {share:.0%} of a copy's rate"
    most = MAX_PROMPT_TIME * seconds[f"{machine.pick(2048, 257)} in 16 bits"]
    is_fast = share >= MIN_COPY_SHARE and seconds[str(machine.pick(2048, 257))] <= most
    wanted = f"{MIN_COPY_SHARE:.0%}, and {MAX_PROMPT_TIME} times 16 bits' time for 2,048 rows"
    return machine.judge(is_fast, wanted, text, {**seconds, "share": share})
