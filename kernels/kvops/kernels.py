"""The interface that a device implements. `ops.Backend` checks every argument before; its
docstrings define the operations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kvops.draws import DrawTensors, PenaltyTables
from kvops.experts import ExpertWeights
from kvops.grouped import GroupedWeight
from kvops.step import AttentionCall, AttentionShape, AttentionStep, HeadsCall

if TYPE_CHECKING:  # the C++ module is absent where Quire is not compiled
    from kvops.native import NativeCpu


class Kernels(ABC):
    """`device`, `native`, `kv_dtypes`, `has_sampler`, `has_low_rank`, `needs_plan`: see
    `ops.Backend`. `reads_whole_blocks`: attention also reads slots of a row's blocks that the row
    does not see, and multiplies them by 0. `has_sinks`: attention has sinks. `max_blocks` is the
    length of the longest block table of a CUDA graph. `linear_rows`: see `ops.Backend`."""

    name: str
    device = "cpu"
    reads_whole_blocks = False
    kv_dtypes: tuple[torch.dtype, ...] = ()
    has_sampler = False
    has_sinks = False
    has_low_rank = False
    needs_plan = False
    max_blocks = 0
    linear_rows: tuple[int, ...] = (1,)
    native: NativeCpu | None = None

    @abstractmethod
    def numerics(self) -> dict[str, str]:
        """Return what the bits of these kernels' results depend on, besides PyTorch's version and
        the dtype: `isa`, the instruction set or the GPU, and versions."""

    def check_attention(self, shape: AttentionShape) -> None:
        """Raises ValueError if the kernels cannot compute attention of this shape."""
        return

    def plan(self, step: AttentionStep) -> None:
        """Called before each step, only if `needs_plan`."""
        raise NotImplementedError

    def warm_up(self, kv_layer: Tensor, shape: AttentionShape, max_rows: int) -> None:
        """Compile all kernels that steps of up to `max_rows` rows need. Writes nothing."""
        return

    @abstractmethod
    def store_heads(self, call: HeadsCall) -> Tensor: ...

    def clear_begun_blocks(self, kv: Tensor, slot_mapping: Tensor) -> None:
        """Called only if `reads_whole_blocks`."""
        raise NotImplementedError

    @abstractmethod
    def paged_attention(self, call: AttentionCall) -> Tensor: ...

    @abstractmethod
    def copy_blocks(self, kv: Tensor, pairs: Tensor, source: Tensor | None) -> None: ...

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor | GroupedWeight, bias: Tensor | None) -> Tensor: ...

    def add_low_rank(
        self, y: Tensor, x: Tensor, tables: Tensor, linear: int, max_rank: int
    ) -> None:
        """Called only if `has_low_rank`."""
        raise NotImplementedError

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    @abstractmethod
    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor: ...

    @abstractmethod
    def gelu_mul(self, gate: Tensor, up: Tensor) -> Tensor: ...

    def normed(self, call: HeadsCall) -> HeadsCall:
        """The call with its norms computed."""
        if call.norms is None:
            return call
        eps, pairs = call.norms.eps, ((call.q, call.norms.query), (call.k, call.norms.key))
        q, k = (
            self.rms_norm(x.reshape(-1, len(weight)), weight, eps).view_as(x) for x, weight in pairs
        )
        return replace(call, q=q, k=k, norms=None)

    def experts(self, x: Tensor, weights: ExpertWeights) -> Tensor:
        """Each expert computes its rows together. A row's outputs are added in the order of the
        experts, so its sum does not depend on the other rows."""
        chosen, shares = weights.choose(self.linear(x.float(), weights.router, weights.router_bias))
        total = torch.zeros_like(x, dtype=torch.float32)
        for expert in range(len(weights.router)):
            rows, places = (chosen == expert).nonzero(as_tuple=True)
            if not len(rows):
                continue
            gate_up, down = weights.of(expert)
            wide = self.linear(x[rows], gate_up, _of(weights.gate_up_bias, expert))
            gate, up = wide.chunk(2, dim=-1)
            gated = self.silu_mul(gate, up) if weights.limit == 0 else weights.swiglu(gate, up)
            out = self.linear(gated, down, _of(weights.down_bias, expert))
            total[rows] += shares[rows, places, None] * out
        return total.to(x.dtype)

    def sample(self, logits: Tensor, draws: DrawTensors, tables: PenaltyTables | None) -> Tensor:
        """Called only if `has_sampler`."""
        raise NotImplementedError

    def warm_up_sampler(self, vocab_size: int) -> None:
        """Compile what `sample` needs."""
        return


def _of(biases: Tensor | None, expert: int) -> Tensor | None:
    return None if biases is None else biases[expert]
