"""A stand-in for the package flash_attn 2.8, in PyTorch: the two functions that Quire calls, with
their whole signatures, their documented meaning for paged caches, and their refusals.

Its memory is read as theirs is: by the strides of the tensors, and never behind a sequence's end;
with `reads_whole_pages`, to the end of a sequence's last page, as the versions for newer GPUs read.
"""

from typing import Any

import torch
from torch import Tensor

Reach = tuple[int, int]

__version__ = "2.8.3"
reads_whole_pages = False


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Reach = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor:
    """q: [total_q, H, D]; k, v: [num_blocks, page, K, D]. Result: as q."""
    assert (dropout_p, alibi_slopes, return_attn_probs) == (0.0, None, False)
    assert softmax_scale is not None
    assert block_table is not None
    num_rows = len(block_table)
    _check(q, k, v, block_table, cu_seqlens_q, cu_seqlens_k)
    assert cu_seqlens_q.shape == cu_seqlens_k.shape == (num_rows + 1,)
    assert cu_seqlens_q.diff().max() <= max_seqlen_q
    assert cu_seqlens_k.diff().max() <= max_seqlen_k
    out = torch.full_like(q, float("nan"))
    begins, lens = cu_seqlens_q.tolist(), cu_seqlens_k.diff().tolist()
    for row, length in enumerate(lens):
        tokens = slice(begins[row], begins[row + 1])
        keys, values = (_pages(cache, block_table[row], length) for cache in (k, v))
        out[tokens] = _attention(
            q[tokens], keys, values, length, softmax_scale, causal, window_size, softcap
        )
    return out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Reach = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor:
    """q: [rows, new tokens, H, D]; caches: [num_blocks, page, K, D]. Result: as q."""
    unused: tuple[Any, ...] = (k, v, rotary_cos, rotary_sin, cache_batch_idx, cache_leftpad)
    assert unused == (None,) * 6
    assert (alibi_slopes, return_softmax_lse) == (None, False)
    assert softmax_scale is not None
    assert block_table is not None
    assert isinstance(cache_seqlens, Tensor)
    assert cache_seqlens.shape == (len(q),) == (len(block_table),)
    _check(q.flatten(0, 1), k_cache, v_cache, block_table, cache_seqlens)
    out = torch.full_like(q, float("nan"))
    for row, length in enumerate(cache_seqlens.tolist()):
        keys, values = (_pages(cache, block_table[row], length) for cache in (k_cache, v_cache))
        out[row] = _attention(
            q[row], keys, values, length, softmax_scale, causal, window_size, softcap
        )
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, *indices: Tensor) -> None:
    assert q.dtype == k.dtype == v.dtype
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert k.shape == v.shape
    assert k.dim() == 4
    assert q.shape[2] == k.shape[3] <= 256
    assert q.shape[1] % k.shape[2] == 0
    assert k.shape[1] % 256 == 0, "Paged KV cache block size must be divisible by 256"
    assert k.stride(-1) == v.stride(-1) == 1
    for index in indices:
        assert index.dtype == torch.int32
        assert index.is_contiguous()


def _pages(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """The rows [length, K, D] of a sequence, or more if whole pages are read."""
    page = cache.shape[1]
    pages = cache[table[: -(-length // page)].long()].flatten(0, 1)
    return pages if reads_whole_pages else pages[:length]


def _attention(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    length: int,
    scale: float,
    causal: bool,
    reach: Reach,
    softcap: float,
) -> Tensor:
    """Query i of n has the position of key i + length - n; `reach`: how many keys it reads to its
    left and right, -1 for all."""
    left, right = reach[0], 0 if causal else reach[1]
    queries_at = torch.arange(len(q)) + length - len(q)
    ahead = torch.arange(len(keys)) - queries_at[:, None]
    hidden = (torch.arange(len(keys)) >= length).repeat(len(q), 1)
    if right >= 0:
        hidden |= ahead > right
    if left >= 0:
        hidden |= ahead < -left
    group = q.shape[1] // keys.shape[1]
    wide_keys = keys.float().repeat_interleave(group, dim=1)
    wide_values = values.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q.float(), wide_keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hij,jhd->ihd", weights, wide_values).to(q.dtype)
