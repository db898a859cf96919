"""CUDA kernels, written in Triton. `import triton` in this folder means the package Triton."""

from functools import cached_property

import torch
import torch.nn.functional as F
import triton  # type: ignore[import-untyped]
from torch import Tensor

from kvops.copying import CudaStream, StagedCopies, copy_between
from kvops.draws import DrawTensors, PenaltyTables
from kvops.experts import ExpertWeights
from kvops.grouped import GroupedWeight
from kvops.kernels import Kernels
from kvops.reference import ReferenceKernels
from kvops.step import AttentionCall, AttentionShape, HeadsCall
from kvops.triton import attention, experts, float8, fusions, heads, linears, low_rank, sampling

NUMERICS = "3"
"""The version of these kernels' results. It changes with every change to a bit of a result, such as
other tiles or splits."""


class TritonKernels(Kernels):
    """The triton backend; it needs the package Triton, and a GPU or Triton's interpreter
    (TRITON_INTERPRET=1)."""

    name = "triton"
    device = "cpu" if triton.knobs.runtime.interpret else "cuda"
    has_sampler = True
    kv_dtypes: tuple[torch.dtype, ...] = (torch.float8_e4m3fn,)
    has_sinks = True
    has_low_rank = True
    linear_rows = linears.LINEAR_ROWS

    def numerics(self) -> dict[str, str]:
        """`cuda` is the version of the toolkit that PyTorch, and so cuBLAS, was built with. Triton
        brings a compiler of its own."""
        return {
            "isa": torch.cuda.get_device_name() if self.device == "cuda" else "interpreted",
            "kernels": NUMERICS,
            "triton": triton.__version__,
            "cuda": torch.version.cuda or "none",
        }

    @cached_property
    def _staged(self) -> StagedCopies:
        return StagedCopies(CudaStream())

    def warm_up(self, kv_layer: Tensor, shape: AttentionShape, max_rows: int) -> None:
        attention.warm_up(kv_layer, shape, max_rows)

    def paged_attention(self, call: AttentionCall) -> Tensor:
        return attention.paged_attention(call)

    def copy_blocks(self, kv: Tensor, pairs: Tensor, source: Tensor | None) -> None:
        """Copies with PyTorch, at memory speed. Within one arena the blocks go through a buffer,
        because one pair's source may be another's target. Between the host and the GPU they are
        copied beside the steps."""
        if source is not None:
            if kv.is_cuda == source.is_cuda:
                copy_between(kv, source, pairs)
            elif kv.is_cuda:
                self._staged.to_gpu(kv, source, pairs)
            else:
                self._staged.to_host(kv, source, pairs)
            return
        sources, targets = pairs.long().unbind(dim=1)
        kv = float8.octets(kv)  # which PyTorch can index on every device
        kv.index_copy_(0, targets, kv.index_select(0, sources))

    def linear(self, x: Tensor, weight: Tensor | GroupedWeight, bias: Tensor | None) -> Tensor:
        """Computed by PyTorch with cuBLAS if the weights are in floating point."""
        if isinstance(weight, GroupedWeight):
            return linears.linear(x, weight, bias)
        return F.linear(x, weight, bias)

    def add_low_rank(
        self, y: Tensor, x: Tensor, tables: Tensor, linear: int, max_rank: int
    ) -> None:
        low_rank.add_low_rank(y, x, tables, linear, max_rank)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return fusions.rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return fusions.rms_norm(x, residual, weight, eps)

    def store_heads(self, call: HeadsCall) -> Tensor:
        norms = call.norms
        if norms is not None and {len(norms.query), len(norms.key)} != {call.q.shape[2]}:
            call = self.normed(call)  # the kernel's norms are as wide as a head
        return heads.store_heads(call)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return fusions.gate_mul(gate, up, gelu=False)

    def gelu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return fusions.gate_mul(gate, up, gelu=True)

    def experts(self, x: Tensor, weights: ExpertWeights) -> Tensor:
        chosen, shares = weights.choose(self.linear(x.float(), weights.router, weights.router_bias))
        return experts.experts(x, weights, chosen, shares)

    def sample(self, logits: Tensor, draws: DrawTensors, tables: PenaltyTables | None) -> Tensor:
        return sampling.sample(logits, draws, tables)

    def warm_up_sampler(self, vocab_size: int) -> None:
        sampling.warm_up(vocab_size, self.device)


class ReferenceAttentionKernels(TritonKernels):
    """Attention by the reference, for comparisons: it is slow, and waits for the device."""

    name = "triton-reference"
    paged_attention = ReferenceKernels.paged_attention
