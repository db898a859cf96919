"""CUDA kernels, written in Triton. `import triton` in this folder means the package Triton."""

import torch.nn.functional as F
from torch import Tensor

from kvops.copying import copy_between
from kvops.triton import attention, fusions


class TritonKernels:
    """The triton backend; it needs the package Triton, and a GPU or Triton's interpreter
    (TRITON_INTERPRET=1)."""

    name = "triton"

    def store_kv(self, kv_layer: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        fusions.store_kv(kv_layer, k, v, slot_mapping)

    def paged_attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        block_tables: Tensor,
        cu_query_lens: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        return attention.paged_attention(
            q, kv_layer, block_tables, cu_query_lens, context_lens, scale, window
        )

    def copy_blocks(self, kv: Tensor, pairs: Tensor, source: Tensor | None) -> None:
        """Copies with PyTorch, at memory speed. Within one arena the blocks go through a buffer,
        because one pair's source may be another's target."""
        if source is not None:
            copy_between(kv, source, pairs)
            return
        sources, targets = pairs.long().unbind(dim=1)
        kv.index_copy_(0, targets, kv.index_select(0, sources))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Computed by PyTorch with cuBLAS."""
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return fusions.rms_norm(x, None, weight, eps)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        return fusions.rms_norm(x, residual, weight, eps)

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        fusions.rope(q, k, cos, sin)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return fusions.silu_mul(gate, up)
