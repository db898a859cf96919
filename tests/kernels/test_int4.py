"""Four-bit weights: the quantization, the packed layout, and the linears of every instruction set
against the definition in `kvops.int4`."""

import pytest
import torch
from torch import Tensor

from kvops.int4 import Int4Weight, joined, packed, quantize
from kvops.native import Kind, NativeCpu, PackedLinear, aligned, packed_bytes, usable_kernels

GROUPS = pytest.mark.parametrize("group", [32, 64, 128])
SHAPES = pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 1, 1), (1, 64, 256), (3, 33, 7), (14, 95, 130), (70, 40, 3073)]
)
NAN = float("nan")


@pytest.fixture(scope="module", params=usable_kernels())
def cpu(request: pytest.FixtureRequest) -> NativeCpu:
    return NativeCpu(1, request.param)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kind_of(group: int) -> Kind:
    kinds: dict[int, Kind] = {32: "int4-32", 64: "int4-64", 128: "int4-128"}
    return kinds[group]


def linear(cpu: NativeCpu, x: Tensor, weight: Int4Weight | Tensor, group: int) -> Tensor:
    """y [M, N] for quantized weights, or for weights that packing quantizes."""
    n, k = (weight.codes if isinstance(weight, Int4Weight) else weight).shape
    kind = kind_of(group)
    memory = aligned(packed_bytes(kind, n, k))
    memory.copy_(torch.cat(list(cpu.packed_pieces(kind, n, [weight]))))
    out = torch.full((len(x), n), NAN)
    cpu.ops.linear(x, PackedLinear(kind, n, k, memory), out)
    return out


def random_weight(n: int, k: int, group: int) -> Int4Weight:
    """Codes of all values; scales are powers of two and zero points integers, so that sums of
    products with small integers are exact."""
    generator = torch.Generator().manual_seed(n + k)
    shape = (n, -(-k // group))
    return Int4Weight(
        torch.randint(0, 16, (n, k), generator=generator, dtype=torch.uint8),
        2.0 ** -torch.randint(0, 4, shape, generator=generator),
        torch.randint(0, 16, shape, generator=generator).float(),
        group,
    )


@GROUPS
@SHAPES
def test_a_linear_is_exact_where_fp32_is(
    cpu: NativeCpu, m: int, n: int, k: int, group: int
) -> None:
    numbers = torch.randint(-127, 128, (m, k), generator=torch.Generator().manual_seed(3)).float()
    numbers[:, 0] = 127
    x_scale = 2.0 ** -(torch.arange(m) % 5).float()
    weight = random_weight(n, k, group)
    expected = (numbers.double() @ weight.dequantized().double().T).float() * x_scale[:, None]
    assert torch.equal(linear(cpu, numbers * x_scale[:, None], weight, group), expected)


@GROUPS
def test_a_linear_is_near_the_dequantized_product(cpu: NativeCpu, group: int) -> None:
    """With activations quantized to 8 bits in a row, a product has an error of half a step."""
    x, weight = randn(9, 700), quantize(randn(130, 700, seed=1), group)
    dequantized = weight.dequantized().double()
    step = x.abs().amax(1, keepdim=True).double() / 127
    expected = x.double() @ dequantized.T
    bound = (0.501 * step) * dequantized.abs().sum(1) + 1e-3
    assert ((linear(cpu, x, weight, group).double() - expected).abs() <= bound).all()


@GROUPS
def test_packing_quantizes_weights_like_quantize(cpu: NativeCpu, group: int) -> None:
    x, weight = randn(3, 300), randn(70, 300, seed=1)
    assert torch.equal(
        linear(cpu, x, weight, group), linear(cpu, x, quantize(weight, group), group)
    )


@GROUPS
def test_the_stored_scales_and_zero_points_are_those_of_the_weight(group: int) -> None:
    """`quantize` rounds scales and zero points before it chooses codes, so that packing loses
    nothing."""
    weight = quantize(randn(64, 300, seed=1) * torch.logspace(-6, 6, 64)[:, None], group)
    panels, outputs = packed(weight)
    groups = panels.view(2, -1, 128 * (1 + group // 8))
    headers = groups[:, :, :128].contiguous().view(torch.float16).float()
    scales, zeros = (headers[:, :, 32 * i : 32 * i + 32].transpose(1, 2) for i in (0, 1))
    assert torch.equal(scales.reshape(64, -1) * outputs[:, None], weight.scales)
    assert torch.equal(zeros.reshape(64, -1), weight.zeros)


@GROUPS
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
def test_quantization_error_is_at_most_a_step(group: int, size: float) -> None:
    weight = randn(40, 300) * size
    quantized = quantize(weight, group)
    steps = quantized.scales.repeat_interleave(group, 1)[:, :300]
    assert ((quantized.dequantized() - weight).abs() <= 2.5 * steps).all()
    error = (quantized.dequantized() - weight).double().norm() / weight.double().norm()
    assert error < {32: 0.08, 64: 0.1, 128: 0.12}[group]


@pytest.mark.parametrize("value", [0.0, 0.5, -3.0])
def test_a_constant_group_is_kept(value: float) -> None:
    weight = torch.full((5, 64), value)
    assert torch.equal(quantize(weight, 32).dequantized(), weight)


def test_one_outlier_far_from_zero_does_not_lose_the_rest() -> None:
    weight = torch.full((1, 32), 1.0)
    weight[0, 3] = 1.0001
    assert torch.allclose(quantize(weight, 32).dequantized(), weight, atol=1e-3)


def test_instruction_sets_with_fused_multiply_add_agree() -> None:
    """int4 sums integers within a group and then adds with FMA in one order: all sets give the same
    bits except the portable one, which may lack FMA."""
    x, weight = randn(14, 400), quantize(randn(95, 400, seed=1), 64)
    results = [
        linear(NativeCpu(1, isa), x, weight, 64) for isa in usable_kernels() if isa != "portable"
    ]
    assert all(torch.equal(result, results[0]) for result in results)


def test_joined_weights_alternate_in_turns() -> None:
    first, second = torch.arange(5)[:, None], torch.arange(10, 13)[:, None]
    assert joined([first, second], 0).flatten().tolist() == [0, 1, 2, 3, 4, 10, 11, 12]
    expected = [0, 1, 10, 11, 2, 3, 12, 0, 4, 0, 0, 0]
    assert joined([first, second], 2).flatten().tolist() == expected


def test_pieces_of_a_gated_pair_are_those_of_the_joined_weight(cpu: NativeCpu) -> None:
    gate, up = randn(100, 96, seed=1), randn(40, 96, seed=2)
    pieces = torch.cat(list(cpu.packed_pieces("int4-32", 224, [gate, up], 16)))
    whole = joined([gate, up], 16)
    panels, scales = packed(quantize(whole, 32))
    assert torch.equal(pieces, torch.cat([panels, scales.view(torch.uint8)]))


def test_int4_weights_are_packed_as_int4_only(cpu: NativeCpu) -> None:
    weight = quantize(randn(32, 64), 32)
    with pytest.raises(ValueError, match="not packed as int8"):
        list(cpu.packed_pieces("int8", 32, [weight]))
    with pytest.raises(ValueError, match="groups of 32"):
        list(cpu.packed_pieces("int4-64", 32, [weight]))
    target = PackedLinear("int4-32", 32, 64, aligned(packed_bytes("int4-32", 32, 64)))
    with pytest.raises(ValueError, match=r"kvops\.int4"):
        cpu.ops.pack(target, [randn(32, 64)])


@pytest.mark.parametrize("kind", ["int4", "int4-16", "int4-256", "int5-32"])
def test_other_kinds_are_refused(kind: str) -> None:
    with pytest.raises(ValueError, match="no weights of kind"):
        packed_bytes(kind, 32, 64)
