"""Numbers in fp8 (e4m3) on a GPU: rows that are rounded for products, and the heads of an arena.

Tensor cores and conversions know fp8 from capability 8.9 on. Elsewhere, and in the interpreter, an
arena's numbers are bytes whose bits are moved to where an fp16 number has them: e4m3 has the bits
of an fp16 number / 256, without the last seven.
"""
# Triton has no type annotations, and a kernel's arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor


@cache
def has_fp8(device: torch.device) -> bool:
    """Whether tensor cores multiply fp8 numbers."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def octets(kv: Tensor) -> Tensor:
    """An arena in fp8 as bytes; another one as it is."""
    return kv.view(torch.uint8) if kv.dtype == torch.float8_e4m3fn else kv


@triton.jit
def stored(values, dtype: tl.constexpr):
    """Values as an arena has them; see `kvops.fp8.saturated`. Adding 2^14 rounds a number below
    2^-6, the least one with a whole mantissa, to a multiple of 2^-9."""
    if dtype == tl.uint8:
        wide = values.to(tl.float32)
        size = tl.minimum(tl.abs(wide), 448.0)
        bits = size.to(tl.int32, bitcast=True)
        code = (bits + 0x7FFFF + (bits >> 20 & 1) >> 20) - (120 << 3)
        small = (size + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(size < 0.015625, small, code)
        code |= wide.to(tl.int32, bitcast=True) >> 24 & 0x80
        return tl.where(tl.abs(wide) < float("inf"), code, 0x7F).to(tl.uint8)
    else:
        return values.to(dtype)


@triton.jit
def loaded(values, dtype: tl.constexpr):
    """Numbers of an arena, or their bytes if they are in fp8, in another dtype."""
    if values.dtype == tl.uint8:
        bits = values.to(tl.int16)
        half = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True)
        wide = tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)
        return wide.to(dtype)
    else:
        return values.to(dtype)


def rounded(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """See `kvops.fp8.rounded`."""
    num_rows, size = x.shape
    values = torch.empty(num_rows, size, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(num_rows, triton.cdiv(size, group), device=x.device)
    width = triton.next_power_of_2(group)
    _round[scales.shape](x.contiguous(), values, scales, size, WIDTH=width)
    return values, scales


@triton.jit
def _round(x, values, scales, size, WIDTH: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = part * WIDTH + tl.arange(0, WIDTH)
    wide = tl.load(x + row * size + i, mask=i < size, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), axis=0) / 448.0, 1e-12)
    scale += tl.sum(wide * 0.0, axis=0)  # NaN if a value is not finite
    tl.store(scales + row * tl.num_programs(1) + part, scale)
    tl.store(values + row * size + i, (wide / scale).to(tl.float8e4nv), mask=i < size)
