"""Weights that are stored quantized are packed unchanged: 8 bits in the layout of those that the
kernels quantize, 4 bits also with negative scales."""

import pytest
import torch

from kvops.int4 import Int4Weight, quantize
from kvops.int8 import Int8Weight
from kvops.native import NativeCpu, PackedLinear, aligned, packed_bytes


def quantized(weight: torch.Tensor) -> Int8Weight:
    """Codes and scales as the kernels compute them."""
    scales = weight.abs().amax(1) / 127
    return Int8Weight((weight / scales[:, None]).round().to(torch.int8), scales)


@pytest.mark.parametrize(
    ("sizes", "k", "turn"), [((32,), 64, 0), ((33, 7, 5), 30, 0), ((40, 40), 129, 16)]
)
def test_codes_have_the_kernels_layout(sizes: tuple[int, ...], k: int, turn: int) -> None:
    generator = torch.Generator().manual_seed(k)
    weights = [torch.randn(n, k, generator=generator) for n in sizes]
    num_outputs = sum(-(-n // turn) * turn for n in sizes) if turn else sum(sizes)
    cpu = NativeCpu()
    expected = [p.clone() for p in cpu.packed_pieces("int8", num_outputs, weights, turn)]
    found = cpu.packed_pieces("int8", num_outputs, [quantized(w) for w in weights], turn)
    assert torch.equal(torch.cat(list(found)), torch.cat(expected))


def test_negative_scales_of_four_bits_stay_exact() -> None:
    """GGUF's Q4_0 has negative scales. Here they are far larger than the positive ones of the same
    output."""
    codes = torch.tensor([[9] * 32 + [7] * 32], dtype=torch.uint8)
    scales = torch.tensor([[-(2.0**20), 2.0**-3]])
    weight = Int4Weight(codes, scales, torch.full((1, 2), 8.0), 32)
    cpu = NativeCpu()
    memory = aligned(packed_bytes("int4-32", 1, 64))
    memory.copy_(torch.cat(list(cpu.packed_pieces("int4-32", 1, [weight]))))
    x, out = torch.zeros(2, 64), torch.empty(2, 1)
    x[0, 0] = x[1, 63] = 127.0
    cpu.ops.linear(x, PackedLinear("int4-32", 1, 64, memory), out)
    assert out.flatten().tolist() == [-(2.0**20) * 127, -(2.0**-3) * 127]


def test_large_linears_come_in_pieces() -> None:
    weight = torch.randn(96, 200_000, generator=torch.Generator().manual_seed(0))
    cpu = NativeCpu()
    pieces = list(cpu.packed_pieces("int8", 96, [quantized(weight)]))
    assert len(pieces) == 3 + 2


def test_codes_are_packed_only_as_their_kind() -> None:
    weight = torch.ones(32, 64)
    cpu = NativeCpu()
    for kind, other in (("int4-64", quantized(weight)), ("int8", quantize(weight, 64))):
        with pytest.raises(ValueError, match=f"in another way are not packed as {kind}"):
            list(cpu.packed_pieces(kind, 32, [other]))  # type: ignore[arg-type]
