"""The heads of a layer before attention: a kernel computes the norms of queries and keys and their
rotation, and stores the new keys and values. A program has some heads of one token; all arithmetic
is in fp32."""
# Triton has no type annotations, and a kernel's arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvops.step import HeadsCall
from kvops.triton.float8 import octets, stored

_HEADS = 8  # of a program of `_store_heads`


def store_heads(call: HeadsCall) -> Tensor:
    """See `kvops.ops.Backend.store_heads`; the norms are as wide as a head."""
    q, k, v, norms, rotation = call.q, call.k, call.v, call.norms, call.rotation
    num_tokens, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    query_weight, key_weight, eps = norms if norms else (q, k, 0.0)
    cos, sin = rotation if rotation else (q, q)
    num_groups = triton.cdiv(num_heads, _HEADS) + 2 * triton.cdiv(num_kv_heads, _HEADS)
    _store_heads[(num_tokens, num_groups)](
        out,
        octets(call.kv_layer),
        call.kv_layer.stride(),
        q,
        q.stride(),
        k,
        k.stride(),
        v,
        v.stride(),
        call.slot_mapping,
        call.slot_mapping.stride(),
        query_weight.contiguous(),
        key_weight.contiguous(),
        eps,
        cos.contiguous(),
        sin.contiguous(),
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HALF=cos.shape[1] if rotation else 0,
        NORMS=norms is not None,
        BLOCK_SIZE=call.kv_layer.shape[2],
        HEADS=_HEADS,
        DIMS=triton.next_power_of_2(head_dim),
    )
    return out


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _store_heads(
    out,
    kv,
    kv_strides,
    q,
    q_strides,
    k,
    k_strides,
    v,
    v_strides,
    slots,
    slots_strides,
    query_weight,
    key_weight,
    eps,
    cos,
    sin,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    NORMS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    DIMS: tl.constexpr,
):
    """A program has some query heads, key heads or value heads of one token."""
    token, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first_key_group: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    num_kv_groups: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    dims = tl.arange(0, DIMS)[None, :]
    cos += token * HALF
    sin += token * HALF
    if group < first_key_group:
        heads = group * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (heads < NUM_HEADS) & (dims < HEAD_DIM)
        line = q + token * q_strides[0] + heads * q_strides[1]
        values = _turned_head(
            line,
            q_strides[2],
            query_weight,
            eps,
            cos,
            sin,
            dims,
            inside,
            HEAD_DIM,
            HALF,
            NORMS,
        )
        tl.store(out + (token * NUM_HEADS + heads) * HEAD_DIM + dims, values, inside)
        return
    slot = tl.load(slots + token * slots_strides[0]).to(tl.int64)
    block_stride, half_stride, slot_stride, head_stride, dim_stride = kv_strides
    place = kv + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride
    heads = (group - first_key_group) % num_kv_groups * HEADS + tl.arange(0, HEADS)[:, None]
    inside = (heads < NUM_KV_HEADS) & (dims < HEAD_DIM) & (slot >= 0)
    place += heads * head_stride + dims * dim_stride
    dtype: tl.constexpr = kv.dtype.element_ty
    if group < first_key_group + num_kv_groups:
        line = k + token * k_strides[0] + heads * k_strides[1]
        values = _turned_head(
            line, k_strides[2], key_weight, eps, cos, sin, dims, inside, HEAD_DIM, HALF, NORMS
        )
        tl.store(place, stored(values, dtype), inside)
    else:
        line = v + token * v_strides[0] + heads * v_strides[1]
        values = tl.load(line + dims * v_strides[2], inside)
        tl.store(place + half_stride, stored(values, dtype), inside)


@triton.jit
def _turned_head(
    line,
    dim_stride,
    weight,
    eps,
    cos,
    sin,
    dims,
    inside,
    HEAD_DIM: tl.constexpr,
    HALF: tl.constexpr,
    NORMS: tl.constexpr,
):
    """Heads of a token, normalized and rotated, in their dtype. Dimension i < 2 HALF is paired with
    the one HALF behind or before it."""
    values = tl.load(line + dims * dim_stride, inside, other=0.0)
    x = values.to(tl.float32)
    factor = tl.full((1, 1), 1.0, tl.float32)
    if NORMS:
        factor = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) / HEAD_DIM + eps)
        x *= factor * tl.load(weight + dims, dims < HEAD_DIM, other=0.0).to(tl.float32)
    if HALF:
        turns = dims < 2 * HALF
        partners = tl.where(turns, tl.where(dims < HALF, dims + HALF, dims - HALF), dims)
        y = tl.load(line + partners * dim_stride, inside, other=0.0).to(tl.float32)
        if NORMS:
            y *= factor * tl.load(weight + partners, dims < HEAD_DIM, other=0.0).to(tl.float32)
        c = tl.load(cos + dims % HALF, turns, other=1.0)
        s = tl.load(sin + dims % HALF, turns, other=0.0)
        x = x * c + tl.where(dims < HALF, -y, y) * s
    return x.to(values.dtype)
