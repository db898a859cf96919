"""Packing of weights into panels: several weights become one linear, piece by piece."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvops.native import Kind, NativeCpu, packed_bytes

KINDS: tuple[Kind, ...] = ("float32", "bfloat16")
K = 40

Weight = Callable[[int], Tensor]


@pytest.fixture
def cpu() -> NativeCpu:
    return NativeCpu(num_threads=2)


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def weight(request: pytest.FixtureRequest) -> Weight:
    """A weight [n, K] whose rows are every second row of a larger tensor."""
    generator = torch.Generator().manual_seed(0)

    def weight(n: int) -> Tensor:
        return torch.randn(2 * n, K, generator=generator).to(request.param)[::2]

    return weight


def packed(kind: Kind, weight: Tensor) -> list[int]:
    """The bytes of one weight in panels [panels, steps, 32 outputs, values of a step]."""
    values, dtype = (1, torch.float32) if kind == "float32" else (2, torch.bfloat16)
    whole = torch.zeros(-(-len(weight) // 32) * 32, K, dtype=dtype)
    whole[: len(weight)] = weight
    panels = whole.view(-1, 32, K // values, values).permute(0, 2, 1, 3).contiguous()
    found: list[int] = panels.view(torch.uint8).flatten().tolist()
    return found


def in_pieces(
    cpu: NativeCpu,
    kind: Kind,
    num_outputs: int,
    weights: list[Tensor],
    piece_bytes: int,
    turn: int = 0,
) -> list[int]:
    given = kind, num_outputs, weights, turn, piece_bytes
    pieces = [piece.tolist() for piece in cpu.packed_pieces(*given)]
    return [byte for piece in pieces for byte in piece]


@pytest.fixture(params=[1, 3, 1000], ids=lambda panels: f"{panels} panels a piece")
def piece_bytes(request: pytest.FixtureRequest) -> int:
    return int(request.param * packed_bytes("bfloat16", 32, K))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_one_after_another(
    cpu: NativeCpu, kind: Kind, weight: Weight, piece_bytes: int
) -> None:
    weights = [weight(100), weight(1), weight(64)]
    assert in_pieces(cpu, kind, 165, weights, piece_bytes) == packed(kind, torch.cat(weights))


@pytest.mark.parametrize("kind", KINDS)
def test_weights_by_turns_with_zeros_behind_the_end_of_one(
    cpu: NativeCpu, kind: Kind, weight: Weight, piece_bytes: int
) -> None:
    first, second = weight(100), weight(40)
    expected = first.new_zeros(224, K)
    for begin in range(0, 100, 16):
        for at, part in ((0, first), (16, second)):
            rows = part[begin : begin + 16]
            expected[2 * begin + at : 2 * begin + at + len(rows)] = rows
    for row in range(100):
        assert torch.equal(expected[row // 16 * 32 + row % 16], first[row])
    assert in_pieces(cpu, kind, 224, [first, second], piece_bytes, 16) == packed(kind, expected)


def test_a_piece_is_no_larger_than_it_may_be(cpu: NativeCpu, weight: Weight) -> None:
    panel = packed_bytes("bfloat16", 32, K)
    pieces = cpu.packed_pieces("bfloat16", 165, [weight(165)], piece_bytes=2 * panel + 1)
    sizes = [len(piece) for piece in pieces]
    assert sizes == [2 * panel, 2 * panel, 2 * panel]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], r"or all bf16 \[n, K\]: $"),
        ([torch.zeros(4, K), torch.zeros(4, K, dtype=torch.bfloat16)], r"bfloat16 \[4, 40\]"),
        ([torch.zeros(4, K), torch.zeros(4, K + 1)], r"float32 \[4, 41\]"),
        ([torch.zeros(8, K, dtype=torch.float16)], r"float16 \[8, 40\]"),
        ([torch.zeros(4, K), torch.zeros(3, K)], "7 outputs of weights are not 8"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    cpu: NativeCpu, weights: list[Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        list(cpu.packed_pieces("float32", 8, weights))
