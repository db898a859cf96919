"""Packing of weights into panels: several weights become one linear, piece by piece, without a
copy."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kvops import native
from kvops.native import Kind, NativeCpu, PackedLinear, aligned, packed_bytes

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


def packed(cpu: NativeCpu, kind: Kind, weight: Tensor) -> list[int]:
    """The bytes of one weight that is packed in one call."""
    n, k = weight.shape
    memory = aligned(packed_bytes(kind, n, k)).fill_(0x55)
    cpu.ops.pack(PackedLinear(kind, n, k, memory), [weight])
    values: list[int] = memory.tolist()
    return values


def in_pieces(
    cpu: NativeCpu, kind: Kind, num_outputs: int, weights: list[Tensor], turn: int = 0
) -> list[int]:
    pieces = [p.tolist() for p in cpu.packed_pieces(kind, num_outputs, weights, turn)]
    return [byte for piece in pieces for byte in piece]


@pytest.fixture(params=[1, 3, 1000], ids=lambda panels: f"{panels} panels a piece")
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes = request.param * packed_bytes("bfloat16", 32, K)
    monkeypatch.setattr(native, "_PIECE_BYTES", num_bytes)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("kind", KINDS)
def test_weights_one_after_another(cpu: NativeCpu, kind: Kind, weight: Weight) -> None:
    weights = [weight(100), weight(1), weight(64)]
    assert in_pieces(cpu, kind, 165, weights) == packed(cpu, kind, torch.cat(weights))


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("kind", KINDS)
def test_weights_by_turns_with_zeros_behind_the_end_of_one(
    cpu: NativeCpu, kind: Kind, weight: Weight
) -> None:
    first, second = weight(100), weight(40)
    expected = first.new_zeros(224, K)
    for begin in range(0, 100, 16):
        for at, part in ((0, first), (16, second)):
            rows = part[begin : begin + 16]
            expected[2 * begin + at : 2 * begin + at + len(rows)] = rows
    for row in range(100):
        assert torch.equal(expected[row // 16 * 32 + row % 16], first[row])
    assert in_pieces(cpu, kind, 224, [first, second], 16) == packed(cpu, kind, expected)


def test_a_piece_is_no_larger_than_it_may_be(
    cpu: NativeCpu, weight: Weight, monkeypatch: pytest.MonkeyPatch
) -> None:
    panel = packed_bytes("bfloat16", 32, K)
    monkeypatch.setattr(native, "_PIECE_BYTES", 2 * panel + 1)
    sizes = [len(piece) for piece in cpu.packed_pieces("bfloat16", 165, [weight(165)])]
    assert sizes == [2 * panel, 2 * panel, 2 * panel]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([], "no weights"),
        ([torch.zeros(4, K), torch.zeros(4, K, dtype=torch.bfloat16)], "differ in dtype or K"),
        ([torch.zeros(4, K), torch.zeros(4, K + 1)], "differ in dtype or K"),
        ([torch.zeros(4, K), torch.zeros(3, K)], r"not \[n, k\]"),
        ([torch.zeros(8, K + 1)], r"not \[n, k\]"),
        ([torch.zeros(8, K, dtype=torch.float16)], "neither float32 nor bfloat16"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    cpu: NativeCpu, weights: list[Tensor], message: str
) -> None:
    target = PackedLinear("float32", 8, K, aligned(packed_bytes("float32", 8, K)))
    with pytest.raises(ValueError, match=message):
        cpu.ops.pack(target, weights)


@pytest.mark.parametrize(("turn", "first"), [(-1, 0), (0, -1), (0, 1)])
def test_turns_and_beginnings_that_cannot_be_are_refused(
    cpu: NativeCpu, turn: int, first: int
) -> None:
    target = PackedLinear("float32", 8, K, aligned(packed_bytes("float32", 8, K)))
    with pytest.raises(ValueError, match=r"turns that cannot be|not \[n, k\]"):
        cpu.ops.pack(target, [torch.zeros(8, K)], turn, first)
