"""The reference backend, against which all others are tested: each operation as its plain formula,
in fp32. It is written for clarity, not speed, and runs on every device."""

import math

import torch
from torch import Tensor

from kvops import fp8, int8_kv
from kvops.grouped import GroupedWeight
from kvops.kernels import Kernels
from kvops.step import AttentionCall, HeadsCall


class ReferenceKernels(Kernels):
    name = "reference"
    kv_dtypes: tuple[torch.dtype, ...] = (torch.int8, torch.float8_e4m3fn)
    has_sinks = True

    def numerics(self) -> dict[str, str]:
        return {"isa": torch.backends.cpu.get_cpu_capability()}

    def store_heads(self, call: HeadsCall) -> Tensor:
        call = self.normed(call)
        if call.rotation is not None:
            self.rope(call.q, call.k, *call.rotation)
        self.store_kv(call.kv_layer, call.k, call.v, call.slot_mapping)
        return call.q

    def store_kv(self, kv_layer: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        block_size = kv_layer.shape[2]
        if kv_layer.dtype == torch.int8:
            k, v = int8_kv.quantize(k), int8_kv.quantize(v)
        elif kv_layer.dtype == torch.float8_e4m3fn:
            k, v = fp8.saturated(k), fp8.saturated(v)
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot != -1:
                kv_layer[slot // block_size, 0, slot % block_size] = k[token]
                kv_layer[slot // block_size, 1, slot % block_size] = v[token]

    def clear_begun_blocks(self, kv: Tensor, slot_mapping: Tensor) -> None:
        for slot in slot_mapping.tolist():
            if slot != -1 and slot % kv.shape[3] == 0:
                kv[slot // kv.shape[3]] = 0

    def paged_attention(self, call: AttentionCall) -> Tensor:
        q, kv_layer = call.q, call.kv_layer
        out = torch.empty_like(q)
        queries_per_kv = q.shape[1] // kv_layer.shape[3]
        for row, context_len in enumerate(call.context_lens.tolist()):
            begin, end = call.cu_query_lens[row : row + 2].tolist()
            keys, values = _gather(kv_layer, call.block_tables[row], context_len)
            keys = keys.repeat_interleave(queries_per_kv, dim=1)
            values = values.repeat_interleave(queries_per_kv, dim=1)
            for token in range(begin, end):
                stop = context_len - (end - token) + 1
                visible = slice(max(0, stop - call.window) if call.window else 0, stop)
                scores = torch.einsum("hd,phd->hp", q[token].float(), keys[visible])
                scores = scores * call.scale
                if call.cap is not None:
                    scores = call.cap * torch.tanh(scores / call.cap)
                if call.sinks is not None:
                    scores = torch.cat([scores, call.sinks[:, None]], dim=-1)
                weights = torch.softmax(scores, dim=-1)[:, : stop - visible.start]
                out[token] = torch.einsum("hp,phd->hd", weights, values[visible])
        return out

    def copy_blocks(self, kv: Tensor, pairs: Tensor, source: Tensor | None) -> None:
        read = kv if source is None else source
        copies = [(target, read[block].clone()) for block, target in pairs.tolist()]
        for target, copy in copies:
            kv[target] = copy

    def linear(self, x: Tensor, weight: Tensor | GroupedWeight, bias: Tensor | None) -> Tensor:
        if isinstance(weight, GroupedWeight):
            rounded = weight.relative().to(x.dtype)
            out = x.float() @ rounded.float().T * weight.outputs
        else:
            out = x.float() @ weight.float().T
        if bias is not None:
            out = out + bias.float()
        return out.to(x.dtype)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        normed = wide / torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
        return (normed * weight.float()).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x
        return self.rms_norm(residual, weight, eps)

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        for x in (q[..., : 2 * cos.shape[-1]], k[..., : 2 * cos.shape[-1]]):
            first, second = x.float().chunk(2, dim=-1)
            rotated = (
                first * cos[:, None] - second * sin[:, None],
                second * cos[:, None] + first * sin[:, None],
            )
            x.copy_(torch.cat(rotated, dim=-1))

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        wide = gate.float()
        return (wide / (1 + torch.exp(-wide)) * up.float()).to(gate.dtype)

    def gelu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        wide = gate.float()
        inner = math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)
        return (0.5 * wide * (1 + torch.tanh(inner)) * up.float()).to(gate.dtype)


def _gather(kv_layer: Tensor, block_table: Tensor, context_len: int) -> tuple[Tensor, Tensor]:
    """Return the keys and the values of positions 0 to context_len - 1, each
    [context_len, K, D], fp32."""
    block_size = kv_layer.shape[2]
    positions = torch.arange(context_len, device=kv_layer.device)
    blocks, offsets = block_table[positions // block_size].long(), positions % block_size
    keys, values = kv_layer[blocks, 0, offsets], kv_layer[blocks, 1, offsets]
    if kv_layer.dtype == torch.int8:
        return int8_kv.dequantize(keys), int8_kv.dequantize(values)
    return keys.float(), values.float()
