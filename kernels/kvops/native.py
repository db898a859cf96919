"""The C++ kernels (`kernels/csrc`): the instruction set that this CPU has, the threads that
compute, weights in panels, and a decoder in one call.

    cpu = NativeCpu(num_threads=2)
    weights = cpu.pack("bfloat16", weight)         # [N, K]
    cpu.ops.linear(x, weights, out)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kvops._native import Adjustment as NativeAdjustment
from kvops._native import (
    Decoder,
    Head,
    Layer,
    Ops,
    PackedLinear,
    Shape,
    ThreadPool,
    packed_bytes,
    usable_kernels,
    wake,
)

__all__ = [
    "NUMERICS",
    "PACKING",
    "Decoder",
    "Head",
    "Kind",
    "Lane",
    "Layer",
    "NativeAdjustment",
    "NativeCpu",
    "NativeDraw",
    "PackedLinear",
    "Shape",
    "packed_bytes",
    "usable_kernels",
    "wake",
]

Kind = Literal["float32", "bfloat16", "int8"]

NativeDraw = tuple[float, float, int, float, int, int, int, NativeAdjustment | None]
"""(temperature or 0 for the likeliest, min_p, top_k, top_p, seed, sequence index, position,
adjustment)."""

PACKING = "panels-32.1"
"""Names the layout of packed weights; another layout, another name."""

NUMERICS = "2"
"""Of what the kernels compute, down to the last bit: another order of sums or another draw, another
number."""

_ALIGNMENT = 64
_PANEL = 32
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Lane:
    """A thread on `cpu` (None: wherever the system puts it), which works only while all `owners`,
    indices of int32 words on a board that workers share, are 0. Who sets one to 0 calls `wake`."""

    cpu: int | None = None
    owners: tuple[int, ...] = ()


class NativeCpu:
    """`num_threads` threads on one instruction set, by default the best that this CPU has.

    ValueError: no such instruction set here, or no threads.
    """

    def __init__(self, num_threads: int = 1, isa: str | None = None) -> None:
        self.isa = isa or usable_kernels()[0]
        self.pool = ThreadPool(num_threads)
        self.ops = Ops(self.isa, self.pool)

    @property
    def num_lanes(self) -> int:
        return self.pool.num_lanes

    def assign(self, lanes: Sequence[Lane], board: Tensor | None = None) -> None:
        """The threads of the next steps; the first, the caller's own, has no owners. To be called
        where steps are. ValueError: no lanes, no such CPU, or an owner that is not on the board."""
        cpus = [-1 if lane.cpu is None else lane.cpu for lane in lanes]
        self.pool.assign(cpus, [list(lane.owners) for lane in lanes], board)

    def pack(self, kind: Kind, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Weights [N, K] fp32 or bf16 in memory of their own."""
        n, k = weight.shape
        memory = aligned(packed_bytes(kind, n, k))
        packed = PackedLinear(kind, n, k, memory, None if bias is None else bias.float())
        self.ops.pack(packed, [weight])
        return packed

    def packed_pieces(
        self, kind: Kind, num_outputs: int, weights: Sequence[Tensor], turn: int = 0
    ) -> Iterator[Tensor]:
        """The `packed_bytes` of a linear of several weights [n_i, K], all fp32 or all bf16, from
        front to back, uint8; each piece holds until the next one is asked for.

        `turn`: the weights take turns by so many outputs, zeros behind the end of one; 0: each
        whole, one after another.
        """
        k = weights[0].shape[1]
        step = max(1, _PIECE_BYTES // packed_bytes(kind, _PANEL, k)) * _PANEL
        memory = aligned(packed_bytes(kind, min(step, num_outputs), k))
        scales, sums = [], []
        for first in range(0, num_outputs, step):
            n = min(step, num_outputs - first)
            piece = memory[: packed_bytes(kind, n, k)]
            self.ops.pack(PackedLinear(kind, n, k, piece), weights, turn, first)
            if kind == "int8":  # What is behind the panels belongs behind those of all pieces.
                num_panel_bytes = len(piece) - 2 * 4 * -(-n // _PANEL) * _PANEL
                piece, values = piece[:num_panel_bytes], piece[num_panel_bytes:].clone()
                scales.append(values[: len(values) // 2])
                sums.append(values[len(values) // 2 :])
            yield piece
        yield from scales
        yield from sums

    def decoder(
        self,
        shape: Shape,
        layers: list[Layer],
        embedding: Tensor,
        final_norm: Tensor,
        rotation: tuple[Tensor, Tensor],
    ) -> Decoder:
        """embedding: [vocab, hidden] fp32 or bf16. final_norm: [hidden] fp32. rotation: cosines and
        sines [positions, head_dim / 2] fp32."""
        return Decoder(
            self.isa,
            self.pool,
            shape,
            layers,
            embedding,
            final_norm,
            rotation[0],
            rotation[1],
        )

    def head(self, weights: PackedLinear) -> Head:
        """weights: [vocab, hidden]."""
        return Head(self.isa, self.pool, weights)


def aligned(num_bytes: int) -> Tensor:
    """uint8 [num_bytes] that begins at a multiple of 64."""
    memory = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
    begin = -memory.data_ptr() % _ALIGNMENT
    return memory[begin : begin + num_bytes]
