"""Quantized weights: their quantization, the packed layout, and the linears of every instruction
set against the definitions in `kvops.int8` and `kvops.int4`."""

from typing import Any

import pytest
import torch
from torch import Tensor

from bench.gpu.experts import randn
from kvops import int4, int8
from kvops.int4 import Int4Weight
from kvops.int8 import Int8Weight
from kvops.native import (
    Kind,
    NativeCpu,
    PackedLinear,
    aligned,
    emulated_kernels,
    packed_bytes,
    usable_kernels,
)
from kvops.quantized import group_of, joined

ALL: tuple[Kind, ...] = ("int8", "int8-16", "int4-32", "int4-64", "int4-128")
KINDS = pytest.mark.parametrize("kind", ALL)
SHAPES = pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (1, 64, 256), (3, 33, 7), (14, 95, 130), (70, 40, 3073)]
)
ISAS = [*usable_kernels(), *emulated_kernels()]
NAN = float("nan")


def has_tiles(cpu: NativeCpu) -> bool:
    """Whether linears multiply bf16 by tiles, instead of 16-bit integers."""
    return cpu.isa.startswith("amx")


def quantize(weight: Tensor, kind: Kind) -> Any:
    return (int8 if is_int8(kind) else int4).quantize(weight, group_of(kind))


def is_int8(kind: Kind) -> bool:
    return kind.startswith("int8")


def linear(cpu: NativeCpu, kind: Kind, x: Tensor, weight: Any) -> Tensor:
    """y [M, N] for quantized weights, or for weights that packing quantizes."""
    n, k = (weight if isinstance(weight, Tensor) else weight.codes).shape
    memory = aligned(packed_bytes(kind, n, k))
    memory.copy_(torch.cat(list(cpu.packed_pieces(kind, n, [weight]))))
    out = torch.full((len(x), n), NAN)
    cpu.ops.linear(x, PackedLinear(kind, n, k, memory), out)
    return out


def simple_weight(kind: Kind, n: int, k: int) -> Any:
    """Codes of 4 bits; scales are powers of two and zero points integers, so that sums of products
    with small integers are exact."""
    generator = torch.Generator().manual_seed(n + k)
    shape = (n, -(-k // group_of(kind)))
    codes = torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8)
    scales = 2.0 ** -torch.randint(0, 4, shape, generator=generator)
    if is_int8(kind):
        return Int8Weight(codes.to(torch.int8) - 8, scales, group_of(kind))
    zeros = torch.randint(0, 16, shape, generator=generator).float()
    return Int4Weight(codes, scales, zeros, group_of(kind))


@KINDS
@SHAPES
def test_a_linear_is_exact_where_fp32_is(
    cpu: NativeCpu, kind: Kind, m: int, n: int, k: int
) -> None:
    """A row's largest value becomes 32,767; its scale is a power of two here."""
    numbers = torch.randint(-127, 128, (m, k), generator=torch.Generator().manual_seed(3)).float()
    numbers[:, 0] = 127 if has_tiles(cpu) else 32767
    x_scale = 2.0 ** -(torch.arange(m) % 5).float()
    weight = simple_weight(kind, n, k)
    expected = (numbers.double() @ weight.dequantized().double().T).float() * x_scale[:, None]
    assert torch.equal(linear(cpu, kind, numbers * x_scale[:, None], weight), expected)


@KINDS
def test_a_linear_is_near_the_dequantized_product(cpu: NativeCpu, kind: Kind) -> None:
    """Activations have 16 bits in a row with outliers, and lose half a step. Tiles round
    activations and weights to bf16."""
    x, weight = randn(9, 700), quantize(randn(130, 700, seed=1), kind)
    x[:, 77] *= 30
    dequantized = weight.dequantized().double()
    expected, size = x.double() @ dequantized.T, x.double().abs() @ dequantized.abs().T
    bound = 0.501 / 32767 * x.abs().amax(1, keepdim=True).double() * dequantized.abs().sum(1)
    if has_tiles(cpu):
        bound = 2.02 * 2.0**-9 * size
    assert ((linear(cpu, kind, x, weight).double() - expected).abs() <= bound + 1e-6 * size).all()


@KINDS
def test_tiles_multiply_the_weights_in_bf16(kind: Kind) -> None:
    """The bits are those of a bf16 linear: a power of two as an output's scale changes no digit."""
    x, weight = randn(300, 1037), quantize(randn(70, 1037, seed=1), kind)
    for cpu in (NativeCpu(1, isa) for isa in ISAS if isa.startswith("amx")):
        expected = linear(cpu, "bfloat16", x.bfloat16(), weight.dequantized().bfloat16())
        assert torch.equal(linear(cpu, kind, x, weight), expected)


@KINDS
def test_sets_without_tiles_agree(kind: Kind) -> None:
    """Sums within a group are whole numbers, and those of groups are added with FMA in one order:
    all sets give the same bits except the portable one, which may lack FMA."""
    x, weight = randn(14, 400), quantize(randn(95, 400, seed=1), kind)
    cpus = [NativeCpu(1, isa) for isa in usable_kernels() if isa != "portable"]
    results = [linear(cpu, kind, x, weight) for cpu in cpus if not has_tiles(cpu)]
    assert all(torch.equal(result, results[0]) for result in results)


@KINDS
def test_packing_quantizes_weights_like_quantize(cpu: NativeCpu, kind: Kind) -> None:
    x, weight = randn(3, 300), randn(70, 300, seed=1)
    assert torch.equal(linear(cpu, kind, x, weight), linear(cpu, kind, x, quantize(weight, kind)))


@KINDS
def test_the_stored_scales_and_zero_points_are_those_of_the_weight(kind: Kind) -> None:
    """`quantize` rounds scales and zero points before it chooses codes, so that packing loses
    nothing."""
    weight = quantize(randn(64, 320, seed=1) * torch.logspace(-6, 6, 64)[:, None], kind)
    panels, outputs = weight.packed()
    run_steps = 1 + group_of(kind) // (2 if is_int8(kind) else 8)
    runs = panels.view(2, -1, 128 * run_steps)
    halves = runs[:, :, :128].contiguous().view(torch.float16).float().view(2, -1, 2, 32)
    first, second = halves.permute(2, 0, 3, 1).reshape(2, 64, -1)
    if is_int8(kind):
        scales = torch.stack([first, second], 2).flatten(1)
    else:
        scales = first
        assert torch.equal(second, weight.zeros)
    assert torch.equal(scales * outputs[:, None], weight.scales)


@KINDS
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
def test_quantization_error_is_at_most_a_step(kind: Kind, size: float) -> None:
    weight = randn(40, 300) * size
    quantized = quantize(weight, kind)
    steps = quantized.scales.repeat_interleave(group_of(kind), 1)[:, :300]
    difference = (quantized.dequantized() - weight).abs()
    assert (difference <= (0.6 if is_int8(kind) else 2.5) * steps).all()
    error = (difference.double().norm() / weight.double().norm()).item()
    assert error < (0.006 if is_int8(kind) else {32: 0.08, 64: 0.1, 128: 0.12}[group_of(kind)])


@pytest.mark.parametrize("value", [0.0, 0.5, -3.0])
def test_a_constant_group_is_kept(value: float) -> None:
    weight = torch.full((5, 64), value)
    assert torch.equal(quantize(weight, "int4-32").dequantized(), weight)


def test_one_outlier_far_from_zero_does_not_lose_the_rest() -> None:
    weight = torch.full((1, 32), 1.0)
    weight[0, 3] = 1.0001
    assert torch.allclose(quantize(weight, "int4-32").dequantized(), weight, atol=1e-3)


def test_joined_weights_alternate_in_turns() -> None:
    first, second = torch.arange(5)[:, None], torch.arange(10, 13)[:, None]
    assert joined([first, second], 0).flatten().tolist() == [0, 1, 2, 3, 4, 10, 11, 12]
    expected = [0, 1, 10, 11, 2, 3, 12, 0, 4, 0, 0, 0]
    assert joined([first, second], 2).flatten().tolist() == expected


@KINDS
def test_pieces_of_a_gated_pair_are_those_of_the_joined_weight(cpu: NativeCpu, kind: Kind) -> None:
    gate, up = randn(100, 96, seed=1), randn(40, 96, seed=2)
    pieces = torch.cat(list(cpu.packed_pieces(kind, 224, [gate, up], 16)))
    panels, scales = quantize(joined([gate, up], 16), kind).packed()
    assert torch.equal(pieces, torch.cat([panels, scales.view(torch.uint8)]))


def test_large_linears_come_in_pieces(cpu: NativeCpu) -> None:
    weight = Int8Weight(torch.ones(96, 300_000, dtype=torch.int8), torch.ones(96, 9375))
    assert len(list(cpu.packed_pieces("int8", 96, [weight]))) == 3 + 1


def test_negative_scales_stay_exact(cpu: NativeCpu) -> None:
    """GGUF's Q4_0 has negative scales. Here they are far larger than the positive ones of the same
    output."""
    codes = torch.tensor([[9] * 32 + [7] * 32], dtype=torch.uint8)
    scales = torch.tensor([[-(2.0**20), 2.0**-3]])
    x = torch.zeros(2, 64)
    x[0, 0] = x[1, 63] = 127.0
    found = linear(cpu, "int4-32", x, Int4Weight(codes, scales, torch.full((1, 2), 8.0), 32))
    assert found.flatten().tolist() == [-(2.0**20) * 127, -(2.0**-3) * 127]


def test_quantized_weights_are_packed_as_their_kind_only(cpu: NativeCpu) -> None:
    for kind, other in (("int8", "int4-32"), ("int4-64", "int4-32"), ("int4-32", "int8")):
        weight = quantize(randn(32, 64), other)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=f"in another way are not packed as {kind}"):
            list(cpu.packed_pieces(kind, 32, [weight]))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["int4", "int4-16", "int4-256", "int5-32"])
def test_other_kinds_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="no weights of kind"):
        packed_bytes(kind, 32, 64)
