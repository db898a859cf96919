"""Vectorized PyTorch for CPU. Attention goes through one row after the other, so that never more
than one sequence's KV is copied out of its blocks."""

import torch
import torch.nn.functional as F
from torch import Tensor


class CpuKernels:
    name = "cpu"

    def store_kv(self, kv_layer: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None:
        block_size = kv_layer.shape[2]
        stored = (slot_mapping >= 0).nonzero().squeeze(1)
        if len(stored) < len(slot_mapping):
            slot_mapping, k, v = slot_mapping[stored], k[stored], v[stored]
        slots = slot_mapping.long()
        blocks, offsets = slots // block_size, slots % block_size
        kv_layer[:, 0][blocks, offsets] = k
        kv_layer[:, 1][blocks, offsets] = v

    def paged_attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        block_tables: Tensor,
        cu_query_lens: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        out = torch.empty_like(q)
        bounds = cu_query_lens.tolist()
        for row, context_len in enumerate(context_lens.tolist()):
            tokens = slice(bounds[row], bounds[row + 1])
            num_queries = tokens.stop - tokens.start
            if num_queries:
                # The first position that the first query sees: nothing before it is read.
                first = 0 if window is None else max(0, context_len - num_queries + 1 - window)
                keys, values = _gather(kv_layer, block_tables[row], first, context_len)
                if num_queries == 1:
                    out[tokens] = _decode(q[tokens], keys, values, scale)
                else:
                    out[tokens] = _prefill(q[tokens], keys, values, scale, window)
        return out

    def copy_blocks(self, kv: Tensor, pairs: Tensor) -> None:
        sources, targets = pairs.long().unbind(dim=1)
        kv.index_copy_(0, targets, kv.index_select(0, sources))

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(dim=-1, keepdim=True).add_(eps))
        return (wide * scale).mul_(weight).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual.add_(x)
        return self.rms_norm(residual, weight, eps)

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
        cos, sin = cos[:, None], sin[:, None]
        for x in (q, k):
            first, second = x.chunk(2, dim=-1)
            rotated = first * cos - second * sin
            second.copy_(second * cos + first * sin)
            first.copy_(rotated)

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(gate).mul_(up)


def _gather(
    kv_layer: Tensor, block_table: Tensor, first: int, context_len: int
) -> tuple[Tensor, Tensor]:
    """One row's keys and values from position `first` on, [1, K, context_len - first, D] each.
    Whole blocks are copied (index_select copies a block at once, indexing would go element by
    element); what is before `first` or behind the context is cut off."""
    block_size = kv_layer.shape[2]
    skipped = first // block_size
    blocks = block_table[skipped : -(-context_len // block_size)]
    positions = slice(first - skipped * block_size, context_len - skipped * block_size)
    keys, values = (
        half.index_select(0, blocks).flatten(0, 1)[positions].transpose(0, 1)[None]
        for half in kv_layer.unbind(dim=1)
    )
    return keys, values


def _decode(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One query sees all that is gathered, so that the queries of one key/value head can stand for
    as many positions: [1, H, D] -> [1, K, H / K, D], and nothing is repeated or masked."""
    grouped = q.reshape(1, keys.shape[1], -1, q.shape[-1])
    return F.scaled_dot_product_attention(grouped, keys, values, scale=scale).reshape_as(q)


def _prefill(q: Tensor, keys: Tensor, values: Tensor, scale: float, window: int | None) -> Tensor:
    """Several queries at the context's end; the mask's lower right corner is at its last pair."""
    num_queries, num_keys = q.shape[0], keys.shape[2]
    causal = num_queries == num_keys and (window is None or window >= num_keys)
    mask = None if causal else _mask(num_queries, num_keys, window)
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        keys,
        values,
        attn_mask=mask,
        is_causal=causal,
        scale=scale,
        enable_gqa=True,
    )
    return out[0].transpose(0, 1)


def _mask(num_queries: int, num_keys: int, window: int | None) -> Tensor:
    """[num_queries, num_keys], True where a query sees a position: the last keys are its own."""
    own = num_keys - num_queries
    mask = torch.ones(num_queries, num_keys, dtype=torch.bool).tril_(own)
    return mask if window is None else mask.triu_(own - window + 1)
