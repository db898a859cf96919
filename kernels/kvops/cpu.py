"""The single operations on a CPU: linears and attention in C++, the rest as the reference has them.

The engine does not use them for a step: `native` computes a whole step in C++, with the same
kernels and with the elementwise operations fused into them.
"""

import torch
from torch import Tensor

from kvops.copying import copy_between
from kvops.grouped import GroupedWeight
from kvops.native import NUMERICS, Kind, NativeCpu
from kvops.reference import ReferenceKernels
from kvops.step import AttentionCall

_KINDS: dict[torch.dtype, Kind] = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class CpuKernels(ReferenceKernels):
    name = "cpu"
    kv_dtypes = (torch.int8,)
    native: NativeCpu

    def __init__(self, isa: str | None = None) -> None:
        """Raises ValueError if this CPU does not have the instruction set."""
        self.native = NativeCpu(isa=isa)

    def numerics(self) -> dict[str, str]:
        return {"isa": self.native.isa, "kernels": NUMERICS}

    def paged_attention(self, call: AttentionCall) -> Tensor:
        out = torch.empty_like(call.q, memory_format=torch.contiguous_format)
        self.native.ops.attention(
            call.q.contiguous(),
            call.kv_layer,
            call.block_tables.int(),
            call.cu_query_lens.int(),
            call.context_lens.int(),
            call.scale,
            call.window or 0,
            out,
            call.cap or 0.0,
            call.sinks,
        )
        return out

    def copy_blocks(self, kv: Tensor, pairs: Tensor, source: Tensor | None) -> None:
        if source is not None:
            copy_between(kv, source, pairs)
            return
        sources, targets = pairs.long().unbind(dim=1)
        kv.index_copy_(0, targets, kv.index_select(0, sources))

    def linear(self, x: Tensor, weight: Tensor | GroupedWeight, bias: Tensor | None) -> Tensor:
        """Packs the weight on each call. For repeated use, call `native.pack` once and keep its
        result."""
        if isinstance(weight, GroupedWeight):
            weight = (weight.relative() * weight.outputs[:, None]).to(x.dtype)
        packed = self.native.pack(_KINDS[weight.dtype], weight.contiguous(), bias)
        out = torch.empty(len(x), len(weight), dtype=x.dtype)
        if len(x):
            self.native.ops.linear(x.contiguous(), packed, out)
        return out
