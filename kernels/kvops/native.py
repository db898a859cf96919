"""The C++ kernels (`kernels/csrc`) as Python uses them: instruction set, threads, packed weights,
and whole decoder steps in one call.

    cpu = NativeCpu(num_threads=2)
    weights = cpu.pack("bfloat16", weight)         # [N, K]
    cpu.ops.linear(x, weights, out)
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvops._native import (
    Adapter,
    Decoder,
    Experts,
    Head,
    Layer,
    Ops,
    PackedLinear,
    Shape,
    ThreadPool,
    emulated_kernels,
    packed_bytes,
    score,
    usable_kernels,
    wake,
)
from kvops._native import Adjustment as NativeAdjustment
from kvops._native import Draws as NativeDraws
from kvops.checks import shown
from kvops.grouped import AnyWeight, as_kind
from kvops.quantized import PANEL, Kind, joined, packed_pieces, padded

__all__ = [
    "NUMERICS",
    "PACKING",
    "Adapter",
    "Decoder",
    "Experts",
    "Head",
    "Kind",
    "Lane",
    "Layer",
    "LowRank",
    "NativeAdjustment",
    "NativeCpu",
    "NativeDraws",
    "PackedLinear",
    "Shape",
    "emulated_kernels",
    "packed_bytes",
    "usable_kernels",
    "wake",
]

LowRank = tuple[Tensor, PackedLinear, Tensor]
"""An adapter's part in a linear: A [rank, K], B [N, ranks of a part], and of each 16 outputs the
first rank that their B is for, int32."""

PACKING = "panels-32.2"
"""The name of the layout of packed weights; a change of the layout changes the name."""

NUMERICS = "7"
"""The version of the kernels' results. It changes with every change to a bit of a result, such as
another order of summation or another draw."""

_DTYPES: dict[Kind, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_ALIGNMENT = 64
_STEP_BYTES = 4
"""The bytes of an output in a step of a panel."""
_PIECE_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Lane:
    """A thread's place in a step: pinned to `cpu` (None: not pinned). `owners` are indices of int32
    words on a board that workers share; the thread computes only while all these words are 0. A
    worker that sets a word to 0 calls `wake`."""

    cpu: int | None = None
    owners: tuple[int, ...] = ()


class NativeCpu:
    """Runs the kernels of one instruction set on `num_threads` threads. The default instruction set
    is the best one of this CPU.

    Raises ValueError if this CPU lacks the instruction set, or num_threads is less than 1.
    """

    def __init__(self, num_threads: int = 1, isa: str | None = None) -> None:
        self.isa = isa or usable_kernels()[0]
        self.pool = ThreadPool(num_threads)
        self.ops = Ops(self.isa, self.pool)

    @property
    def num_lanes(self) -> int:
        return self.pool.num_lanes

    def assign(self, lanes: Sequence[Lane], board: Tensor | None = None) -> None:
        """Set the threads of the next steps. The first lane is the calling thread and has no
        owners. Call it on the thread that runs the steps. Raises ValueError if there are no lanes,
        if a CPU does not exist, or if an owner is not on the board."""
        cpus = [-1 if lane.cpu is None else lane.cpu for lane in lanes]
        self.pool.assign(cpus, [list(lane.owners) for lane in lanes], board)

    def pack(self, kind: Kind, weight: Tensor, bias: Tensor | None = None) -> PackedLinear:
        """Pack weights [N, K], fp32 or bf16, into newly allocated memory."""
        n, k = weight.shape
        memory = aligned(packed_bytes(kind, n, k))
        begin = 0
        for piece in self.packed_pieces(kind, n, [weight]):
            memory[begin : begin + len(piece)] = piece
            begin += len(piece)
        return PackedLinear(kind, n, k, memory, None if bias is None else bias.float())

    def packed_pieces(
        self,
        kind: Kind,
        num_outputs: int,
        weights: Sequence[AnyWeight],
        turn: int = 0,
        piece_bytes: int = _PIECE_BYTES,
    ) -> Iterator[Tensor]:
        """Give the `packed_bytes` of one linear made of several weights [n_i, K], all fp32 or all
        bf16, or quantized as `kind` says, as consecutive uint8 pieces of at most `piece_bytes`, or
        of one panel (of one turn of panels) if that is more. Raises ValueError if weights differ in
        dtype or K, or are quantized in another way.

        The outputs alternate between the weights, `turn` at a time, and zeros follow the end of a
        shorter weight. If `turn` is 0, the weights follow one another whole.
        """
        if kind in _DTYPES:
            floats = [weight for weight in weights if isinstance(weight, Tensor)]
            if len(floats) < len(weights):
                raise ValueError(f"quantized weights are not packed as {kind}")
            yield from _float_pieces(_DTYPES[kind], num_outputs, floats, turn, piece_bytes)
        else:
            yield from packed_pieces(num_outputs, as_kind(kind, weights), turn, piece_bytes)

    def decoder(
        self,
        shape: Shape,
        layers: list[Layer],
        embedding: Tensor,
        final_norm: Tensor,
    ) -> Decoder:
        """Make a decoder of `layers`. embedding: [vocab, hidden] fp32 or bf16. final_norm: [hidden]
        fp32."""
        return Decoder(self.isa, self.pool, shape, layers, embedding, final_norm)

    def head(self, weights: PackedLinear, factor: float = 1.0, cap: float = 0.0) -> Head:
        """Make a head, from final states to tokens and logprobs. weights: [vocab, hidden]. Logits
        are multiplied by `factor`, and then bounded by the soft cap `cap` (0: none)."""
        return Head(self.isa, self.pool, weights, factor, cap)

    def score(self, logits: Tensor, token_ids: Tensor, logprobs: Tensor, ranks: Tensor) -> None:
        """Write the logprobs [M, 1 + k] and ranks [M] of the first token of each row of `token_ids`
        [M, 1 + k], by logits [M, vocab]; rank 0 marks logits that are not finite. The k likeliest
        tokens with their logprobs follow."""
        score(self.isa, self.pool, logits, token_ids, logprobs, ranks)


def aligned(num_bytes: int) -> Tensor:
    """Return a uint8 tensor [num_bytes] whose address is a multiple of 64."""
    memory = torch.empty(num_bytes + _ALIGNMENT, dtype=torch.uint8)
    begin = -memory.data_ptr() % _ALIGNMENT
    return memory[begin : begin + num_bytes]


def _float_pieces(
    dtype: torch.dtype, num_outputs: int, weights: Sequence[Tensor], turn: int, piece_bytes: int
) -> Iterator[Tensor]:
    """Give panels of weights in floating point, in pieces of whole panels and turns."""
    kinds = {(weight.dtype, weight.shape[1]) for weight in weights}
    if len(kinds) != 1 or weights[0].dtype not in _DTYPES.values():
        found = ", ".join(map(shown, weights))
        raise ValueError(f"weights that are not all fp32 [n, K] or all bf16 [n, K]: {found}")
    unit = math.lcm(PANEL, turn * len(weights)) if turn else PANEL
    k = weights[0].shape[1]
    padded_k = k + -k % (_STEP_BYTES // dtype.itemsize)
    step = max(1, piece_bytes // (unit * padded_k * dtype.itemsize)) * unit
    for begin in range(0, num_outputs, step):
        num_rows = min(step, num_outputs - begin)
        rows = _outputs(weights, turn, begin, begin + num_rows)
        if len(rows) < num_rows:
            raise ValueError(f"{begin + len(rows)} outputs of weights are not {num_outputs}")
        words = padded(rows.to(dtype), num_rows + -num_rows % PANEL, padded_k).view(torch.int32)
        panels = torch.empty(len(words) // PANEL, words.shape[1], PANEL, dtype=torch.int32)
        for panel, outputs in zip(panels, words.view(-1, PANEL, words.shape[1]), strict=True):
            panel.copy_(outputs.T)
        yield panels.view(torch.uint8).flatten()


def _outputs(weights: Sequence[Tensor], turn: int, begin: int, end: int) -> Tensor:
    """Rows `begin` to `end` of the `joined` weights; `begin` is a multiple of whole turns."""
    if turn:
        last = -(-end // (turn * len(weights))) * turn
        some = [weight[begin // len(weights) : last] for weight in weights]
        return joined(some, turn)[: end - begin]
    parts, at = list[Tensor](), 0
    for weight in weights:
        parts.append(weight[max(begin - at, 0) : max(end - at, 0)])
        at += len(weight)
    return torch.cat(parts)
