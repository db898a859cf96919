"""The single operations on a CPU: linears and attention are in C++, the others in PyTorch.

The ranks of a worker use them. A worker of one rank does not: `native` computes its whole step in
C++, with the same kernels and with the elementwise operations fused into them.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvops import int8_kv
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

    def store_kv(self, kv_layer: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        block_size = kv_layer.shape[2]
        stored = (slot_mapping >= 0).nonzero().squeeze(1)
        if len(stored) < len(slot_mapping):
            slot_mapping, k, v = slot_mapping[stored], k[stored], v[stored]
        if kv_layer.dtype == torch.int8:
            k, v = int8_kv.quantize(k), int8_kv.quantize(v)
        slots = slot_mapping.long()
        blocks, offsets = slots // block_size, slots % block_size
        kv_layer[:, 0][blocks, offsets] = k
        kv_layer[:, 1][blocks, offsets] = v

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

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True).add_(eps))
        return (wide * scale).mul_(weight).to(x.dtype)

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        cos, sin = cos[:, None], sin[:, None]
        for x in (q, k):
            first, second = x[..., : 2 * cos.shape[-1]].chunk(2, dim=-1)
            rotated = first * cos - second * sin
            second.copy_(second * cos + first * sin)
            first.copy_(rotated)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate).mul_(up)

    def gelu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.gelu(gate, approximate="tanh").mul_(up)
