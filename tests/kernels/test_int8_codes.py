"""Weights that are already quantized to 8 bits are packed like those that the kernels quantize."""

import pytest
import torch

from kvops.int4 import quantize
from kvops.int8 import Int8Weight
from kvops.native import NativeCpu


def quantized(weight: torch.Tensor) -> Int8Weight:
    """As the kernels do it."""
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
