"""Attention over paged KV: one kernel for rows of any length, and one that combines splits.

A program computes one *tile*: some query tokens of one row, with all query heads of one key/value
head, so that the program reads each key and value once for the whole group of heads. The kernel
runs in one of two shapes:

    prefill   a tile has as many tokens as fill its lines; one program reads its whole context
    decode    each row has one token, which is a tile; one program reads each split of the context,
              and `combine` combines them

The launch waits for no values from the device: shapes bound the number of tiles and splits, and
programs beyond a row's last tile or split end at once.

Triton compiles a kernel again for other constants, and for arguments that become 1 or a multiple
of 16. So constants depend on the number of rows by buckets only, and arguments that change from
step to step are not specialized: `warm_up` compiles all that steps need.

A split's bounds depend only on the row's own context, so that a decoded row has the same bits in
every batch. The softmax is that of FlashAttention (Dao et al., 2022), the splits are those of
Flash-Decoding (Dao et al., 2023).
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from kvops.step import AttentionCall, AttentionShape
from kvops.triton import attention_kernels as kernels
from kvops.triton.float8 import has_fp8, octets

_MIN_DOT = 16  # the smallest side of a matrix product on tensor cores
_MIN_SPLIT = 256  # positions; a program needs about as long for them as a launch takes
_MAX_SPLITS = 32
_FIRST_BUCKET = 16
_BUCKET_FACTOR = 16


class _Tiles(NamedTuple):
    """`lines`: at least. `keys`: of one round of the loop. `num_stages`: of the loop's pipeline."""

    lines: int
    keys: int
    num_warps: int
    num_stages: int


def _tiles(decode: bool, wide: bool, hopper: bool) -> _Tiles:
    """Those of 128 dimensions in bf16 were chosen by their time on an H200. `wide`: lines of more
    than 256 bytes, which take fewer keys at once, to fit shared memory, and more warps, to fit
    registers. `hopper`: a program may have up to 227 KiB of shared memory, from which matrix
    products read their operands; other capabilities since 8.0 have from 99 KiB on."""
    if wide:
        return _Tiles(_MIN_DOT if decode else 64, 32, 8, 3)
    if decode:
        return _Tiles(_MIN_DOT, 64, 2, 3)
    return _Tiles(128, 128, 8, 2) if hopper else _Tiles(64, 64, 4, 2)


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def paged_attention(call: AttentionCall) -> Tensor:
    """See `kvops.ops.Backend.paged_attention`."""
    q, kv_layer, decode = call.q, call.kv_layer, call.is_decode
    num_tokens, num_heads, head_dim = q.shape
    block_size, num_kv_heads = kv_layer.shape[2:4]
    num_rows, group = len(call.context_lens), num_heads // num_kv_heads
    tiles = _tiles(decode, q.element_size() * head_dim > 256, _is_hopper(q.device))
    lines = max(tiles.lines, triton.next_power_of_2(group))
    tokens_per_tile = 1 if decode else lines // group
    num_tiles = num_tokens if tokens_per_tile == 1 else num_tokens // tokens_per_tile + num_rows
    num_splits = min(_MAX_SPLITS, triton.cdiv(call.longest_context, _MIN_SPLIT)) if decode else 1
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    parts, maxima, sums = _partials(out, num_splits) if num_splits > 1 else (out, out, out)
    kernels.attend[(num_tiles, num_kv_heads, num_splits)](
        q,
        q.stride(),
        kv_layer if has_fp8(q.device) else octets(kv_layer),
        kv_layer.stride(),
        call.block_tables,
        *call.block_tables.stride(),
        call.cu_query_lens,
        call.context_lens,
        parts,
        maxima,
        sums,
        call.sinks,
        num_rows,
        call.scale / call.cap if call.cap else call.scale * math.log2(math.e),
        (call.cap or 0.0) * math.log2(math.e),
        kernels.NO_WINDOW.value if call.window is None else call.window,
        HEAD_DIM=head_dim,
        GROUP=group,
        BLOCK_SIZE=block_size,
        DECODE=decode,
        ROWS=1 if decode else _bucket(num_rows),
        TOKENS=tokens_per_tile,
        LINES=lines,
        KEYS=tiles.keys,
        DIMS=max(_MIN_DOT, triton.next_power_of_2(head_dim)),
        SPLIT=num_splits > 1,
        CAPPED=call.cap is not None,
        MIN_SPLIT=_MIN_SPLIT,
        MAX_SPLITS=_MAX_SPLITS,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if num_splits > 1:
        kernels.combine[(num_tokens, num_heads)](
            parts,
            maxima,
            sums,
            call.sinks,
            out,
            num_splits,
            HEAD_DIM=head_dim,
            DIMS=triton.next_power_of_2(head_dim),
            MAX_SPLITS=_MAX_SPLITS,
        )
    return out


def warm_up(kv_layer: Tensor, shape: AttentionShape, max_rows: int) -> None:
    """Compile what steps of up to `max_rows` rows need: decode steps with and without splits, and
    prefill steps in each bucket of rows. All rows are in block 0, and the results are dropped."""
    block_size, _, head_dim = kv_layer.shape[2:]
    sinks = kv_layer.new_zeros(shape.num_heads, dtype=torch.float32) if shape.has_sinks else None
    buckets = [_FIRST_BUCKET]
    while buckets[-1] < max_rows:
        buckets.append(buckets[-1] * _BUCKET_FACTOR)
    steps = [(1, 1, 1), (1, 1, _MIN_SPLIT // block_size + 1), *((2, rows, 1) for rows in buckets)]
    for new, num_rows, num_blocks in steps:
        begins = torch.full((num_rows + 1,), new, dtype=torch.int32, device=kv_layer.device)
        begins[0] = 0
        queries = (new, shape.num_heads, head_dim)
        call = AttentionCall(
            torch.zeros(queries, dtype=shape.dtype, device=kv_layer.device),
            kv_layer,
            torch.zeros((num_rows, num_blocks), dtype=torch.int32, device=kv_layer.device),
            begins,
            torch.full_like(begins[1:], min(new, block_size)),
            scale=1.0,
            window=None,
            max_query_len=new,
            cap=shape.cap,
            sinks=sinks,
        )
        paged_attention(call)


def _bucket(num_rows: int) -> int:
    """Return the smallest of 16, 256, 4,096 .. that is not less than the number of rows."""
    bucket = _FIRST_BUCKET
    while bucket < num_rows:
        bucket *= _BUCKET_FACTOR
    return bucket


def _partials(out: Tensor, num_splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the results of each token, head and split, fp32: the weighted sum of the values, the
    largest score, and the sum of the weights."""
    num_tokens, num_heads, head_dim = out.shape
    shape = (num_tokens, num_heads, num_splits)
    parts = torch.empty((*shape, head_dim), dtype=torch.float32, device=out.device)
    maxima, sums = torch.empty((2, *shape), dtype=torch.float32, device=out.device)
    return parts, maxima, sums
