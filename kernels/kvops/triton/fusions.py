"""Fused kernels, which read and write memory once instead of several times: norms and activation,
with all arithmetic in fp32; and blocks cleared where tokens begin them. A program has one token, or
a part of it."""
# Triton has no type annotations, and a kernel's arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvops.triton.float8 import octets

_GATE_WIDTH = 1024
_CLEAR_WIDTH = 4096
_CLEAR_PARTS = 16


def clear_begun_blocks(kv: Tensor, slot_mapping: Tensor) -> None:
    """See `kvops.ops.Backend.clear_begun_blocks`. Few tokens begin a block: the programs of all
    others end at once."""
    if not kv[0].is_contiguous():
        raise ValueError(f"kv: blocks of strides {kv.stride()} are not contiguous")
    _clear_begun_blocks[(len(slot_mapping), _CLEAR_PARTS)](
        octets(kv),
        kv.stride()[0],
        slot_mapping,
        slot_mapping.stride(),
        kv[0].numel(),
        BLOCK_SIZE=kv.shape[3],
        WIDTH=_CLEAR_WIDTH,
    )


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _clear_begun_blocks(
    kv,
    block_stride,
    slots,
    slots_strides,
    size,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Zeroes each n-th run of WIDTH values of the block that begins with the token's slot."""
    slot = tl.load(slots + tl.program_id(0).to(tl.int64) * slots_strides[0]).to(tl.int64)
    if (slot < 0) | (slot % BLOCK_SIZE != 0):
        return
    block = kv + slot // BLOCK_SIZE * block_stride
    zeros = tl.zeros([WIDTH], kv.dtype.element_ty)
    for begin in range(tl.program_id(1) * WIDTH, size, tl.num_programs(1) * WIDTH):
        i = begin + tl.arange(0, WIDTH)
        tl.store(block + i, zeros, i < size)


def rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Return the norm of x, or of `residual` after adding x to it."""
    size = x.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    tokens = x.reshape(-1, size)
    # view, not reshape: the kernel must write into the caller's memory, never into a copy of it.
    sums = tokens if residual is None else residual.view(-1, size)
    _rms_norm[(len(tokens),)](
        tokens,
        tokens.stride(),
        sums,
        sums.stride(),
        weight,
        weight.stride(),
        out,
        eps,
        SIZE=size,
        WIDTH=triton.next_power_of_2(size),
        ADD=residual is not None,
    )
    return out


@triton.jit
def _rms_norm(
    x,
    x_strides,
    residual,
    residual_strides,
    weight,
    weight_strides,
    out,
    eps,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
):
    token, dims = tl.program_id(0).to(tl.int64), tl.arange(0, WIDTH)
    inside = dims < SIZE
    values = tl.load(x + token * x_strides[0] + dims * x_strides[1], inside, other=0.0)
    wide = values.to(tl.float32)
    if ADD:
        place = residual + token * residual_strides[0] + dims * residual_strides[1]
        wide += tl.load(place, inside, other=0.0).to(tl.float32)
        total = wide.to(residual.dtype.element_ty)
        tl.store(place, total, inside)
        wide = total.to(
            tl.float32
        )  # the norm uses the rounded sum, which is the residual that the next layer adds to
    scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / SIZE + eps)
    weights = tl.load(weight + dims * weight_strides[0], inside, other=0.0).to(tl.float32)
    tl.store(out + token * SIZE + dims, (wide * scale * weights).to(out.dtype.element_ty), inside)


def gate_mul(gate: Tensor, up: Tensor, *, gelu: bool) -> Tensor:
    """See `kvops.ops.Backend.silu_mul` and `gelu_mul`."""
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    num_tokens, size = gate.shape
    _activate_mul[(num_tokens, triton.cdiv(size, _GATE_WIDTH))](
        gate, gate.stride(), up, up.stride(), out, size, WIDTH=_GATE_WIDTH, GELU=gelu
    )
    return out


@triton.jit
def _activate_mul(
    gate,
    gate_strides,
    up,
    up_strides,
    out,
    size,
    WIDTH: tl.constexpr,
    GELU: tl.constexpr,
):
    """silu(x) = x * logistic(x); gelu(x), with y = sqrt(2 / pi) * (x + 0.044715 x^3) in tanh, is
    x / 2 * (1 + tanh(y)) = x * logistic(2 y)."""
    token = tl.program_id(0).to(tl.int64)
    dims = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = dims < size
    g = tl.load(gate + token * gate_strides[0] + dims * gate_strides[1], inside).to(tl.float32)
    u = tl.load(up + token * up_strides[0] + dims * up_strides[1], inside).to(tl.float32)
    inner = g
    if GELU:
        inner = g * (1.5957691216057308 + 0.0713548162726009 * g * g)
    activated = g / (1.0 + tl.exp(-inner))
    tl.store(out + token * size + dims, (activated * u).to(out.dtype.element_ty), inside)
