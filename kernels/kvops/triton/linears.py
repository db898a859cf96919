"""Linears with quantized weights, which stay packed in memory (`kvops.grouped`): a program unpacks
tiles of them into registers, in x's dtype, and multiplies in fp32.

    up to 16 rows     tiles of 16 rows
    up to 64 and 256  tiles of 64 rows
    more              would unpack each weight many times: one kernel unpacks all into memory, and
                      cuBLAS multiplies

If there are few tiles, their inputs are divided among programs, so that all of the GPU reads; a
second kernel adds the sums in order. All numbers of rows up to one of these bounds are computed
alike, so a row has the same bits beside any others.

Above 16 rows, weights in fp8 are multiplied in fp8 where the GPU has that: rows are rounded to fp8
too, with a scale for each chunk, or one for all inputs if the weights of an output have one.
"""
# Triton has no type annotations, and a kernel's arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from kvops.grouped import CHUNK, GroupedWeight
from kvops.triton.float8 import has_fp8, rounded

BOUNDS = (16, 64, 256)
"""The largest numbers of rows that are computed alike."""
LINEAR_ROWS = (1, *(bound + 1 for bound in BOUNDS))
_MOST_ROWS, _OUTPUTS = 64, 64
"""Of a tile."""
_LARGE = 128
"""Rows and outputs of a tile of many rows in fp8."""
_PROGRAMS = 512
"""About four for each multiprocessor of a large GPU, which have enough reads in flight."""
_FEWEST_CHUNKS = 4  # of a program
_SUM_WIDTH = 1024


def linear(x: Tensor, weight: GroupedWeight, bias: Tensor | None) -> Tensor:
    bound = next((bound for bound in BOUNDS if len(x) <= bound), None)
    in_fp8 = bound != BOUNDS[0] and _fits_fp8(x, weight) and has_fp8(x.device)
    if in_fp8 and weight.kind == "fp8":
        return _scaled(x, weight, bias)
    if in_fp8:
        values, row_scales = rounded(x, CHUNK)
        return _multiplied(values, row_scales, weight, bias, x.dtype, bound)
    if bound is not None:
        return _multiplied(x.contiguous(), None, weight, bias, x.dtype, bound)
    return F.linear(x, unpacked(weight, x.dtype), bias)


def _multiplied(
    x: Tensor,
    row_scales: Tensor | None,
    weight: GroupedWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    bound: int | None,
) -> Tensor:
    """`row_scales` are those of each row's chunks if x is in fp8. `bound` is that of the number of
    rows; None makes large tiles."""
    num_rows, num_outputs = len(x), len(weight.codes)
    rows, width = (_LARGE, _LARGE) if bound is None else (min(bound, _MOST_ROWS), _OUTPUTS)
    num_chunks = triton.cdiv(weight.num_inputs, CHUNK)
    most_tiles = (bound or _PROGRAMS * rows) // rows * triton.cdiv(num_outputs, width)
    splits = max(1, min(num_chunks // _FEWEST_CHUNKS, _PROGRAMS // most_tiles))
    chunks = triton.cdiv(num_chunks, splits)
    splits = triton.cdiv(num_chunks, chunks)
    out = torch.empty(num_rows, num_outputs, dtype=dtype, device=x.device)
    sums = out if splits == 1 else x.new_empty(splits, num_rows, num_outputs, dtype=torch.float32)
    if not num_rows:
        return out
    _multiply[(triton.cdiv(num_rows, rows), triton.cdiv(num_outputs, width), splits)](
        x,
        row_scales,
        weight.codes,
        weight.scales,
        weight.outputs,
        bias if splits == 1 else None,
        sums,
        num_rows,
        weight.num_inputs,
        num_outputs,
        chunks,
        FORM=weight.form,
        GROUP=weight.group,
        WIDTH=weight.width,
        CHUNK=CHUNK,
        ROWS=rows,
        OUTPUTS=width,
        num_warps=8 if bound is None else 4,
        num_stages=3 if bound is None else 4,
    )
    if splits > 1:
        _add[(num_rows, triton.cdiv(num_outputs, _SUM_WIDTH))](
            sums, bias, out, num_outputs, splits, WIDTH=_SUM_WIDTH
        )
    return out


def _fits_fp8(x: Tensor, weight: GroupedWeight) -> bool:
    """Whether the sizes are those that PyTorch multiplies in fp8."""
    sizes = weight.num_inputs, len(weight.codes)
    return weight.form == "fp8" and x.dtype == torch.bfloat16 and not any(n % 16 for n in sizes)


def _scaled(x: Tensor, weight: GroupedWeight, bias: Tensor | None) -> Tensor:
    """Multiply in fp8 by PyTorch, with one scale for each row and each output. The groups' scales
    are 1 (`kvops.quantized.output_scales`)."""
    size = weight.num_inputs
    values, scales = rounded(x, size)
    weights = weight.codes.view(torch.float8_e4m3fn)[:, :size].T
    outputs = weight.outputs[None, :]
    return torch._scaled_mm(values, weights, scales, outputs, bias, out_dtype=x.dtype)


@triton.jit
def _weights(codes, words, FORM: tl.constexpr):
    """Codes [outputs, inputs] of one group as weights, fp32. A code becomes the top bits of the
    mantissa of a number with a known exponent: that takes fewer instructions than a conversion."""
    if FORM == "int4":
        scale = (words & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        zero = (words >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        value = (codes.to(tl.int32) << 19 | 0x41800000).to(tl.float32, bitcast=True)  # 16 + code
        return value * scale[:, None] - ((zero + 16) * scale)[:, None]
    if FORM == "fp4":  # e2m1, with the bits of an fp16 number / 2^14, and an exponent
        bits = codes.to(tl.int16)
        value = ((bits & 8) << 12 | (bits & 7) << 9).to(tl.float16, bitcast=True).to(tl.float32)
        scale = ((words & 0xFF) << 23).to(tl.float32, bitcast=True)
        return value * (16384 * scale)[:, None]
    scale = words.to(tl.float32, bitcast=True)
    if FORM == "int8":
        value = (codes.to(tl.int32) << 15 | 0x43800000).to(tl.float32, bitcast=True)  # 384 + code
        return value * scale[:, None] - (384 * scale)[:, None]
    bits = codes.to(tl.int16)  # e4m3, whose bits are those of an fp16 number / 256
    value = ((bits & 0x80) << 8 | (bits & 0x7F) << 7).to(tl.float16, bitcast=True).to(tl.float32)
    return value * (256 * scale)[:, None]


@triton.jit
def sums(
    x_at,
    is_row,
    codes,
    scales,
    outputs,
    is_output,
    num_inputs,
    num_outputs,
    first,
    last,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    row_scales=None,
):
    """The products [outputs, rows] of the inputs from chunk `first` to `last`, without the scales
    of the outputs. `x_at` [rows] points to the first input of each row; `row_scales` [rows], for x
    in fp8, to its first scale. A chunk is one group then."""
    PER_BYTE: tl.constexpr = 2 if FORM == "int4" or FORM == "fp4" else 1
    PER_WORD: tl.constexpr = CHUNK if FORM == "fp4" else GROUP  # inputs
    places = tl.arange(0, WIDTH)
    row_bytes = tl.cdiv(num_inputs, CHUNK) * (CHUNK // PER_BYTE)
    codes_at = codes + outputs.to(tl.int64)[:, None] * row_bytes + places[None, :]
    values_at = x_at[None, :] + places[:, None]
    total = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for chunk in range(first, last):
        for part in tl.static_range(CHUNK // (WIDTH * PER_BYTE)):
            begin = chunk * CHUNK + part * WIDTH * PER_BYTE
            octets = tl.load(codes_at + begin // PER_BYTE, mask=is_output[:, None], other=0)
            for half in tl.static_range(PER_BYTE):
                k = begin + half * WIDTH
                scales_at = scales + (k // PER_WORD).to(tl.int64) * num_outputs + outputs
                words = tl.load(scales_at, mask=is_output, other=0)
                words >>= (part * PER_BYTE + half) * WIDTH % PER_WORD // GROUP * 8
                is_value = is_row[None, :] & (places < num_inputs - k)[:, None]
                values = tl.load(values_at + k, mask=is_value, other=0.0)
                some = octets
                if PER_BYTE == 2:
                    some = octets >> 4 if half else octets & 15
                if row_scales is not None:
                    product = tl.dot(some.to(tl.float8e4nv, bitcast=True), values)
                    of_rows = tl.load(row_scales + chunk, mask=is_row, other=0.0)
                    scale = words.to(tl.float32, bitcast=True)
                    total += product * (scale[:, None] * of_rows[None, :])
                else:
                    weights = _weights(some, words, FORM).to(values.dtype)
                    total = tl.dot(weights, values, acc=total, input_precision="ieee")
    return total


@triton.jit(do_not_specialize=["num_rows", "chunks"])
def _multiply(
    x,
    row_scales,
    codes,
    scales,
    factors,
    biases,
    out,
    num_rows,
    num_inputs,
    num_outputs,
    chunks,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """Computes a tile of `out` [splits, rows, outputs], from some chunks of inputs."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    split, num_chunks = tl.program_id(2), tl.cdiv(num_inputs, CHUNK)
    is_row, is_output = rows < num_rows, outputs < num_outputs
    scales_of_rows = None
    if row_scales is not None:
        scales_of_rows = row_scales + rows * num_chunks
    total = sums(
        x + rows * num_inputs,
        is_row,
        codes,
        scales,
        outputs,
        is_output,
        num_inputs,
        num_outputs,
        split * chunks,
        tl.minimum((split + 1) * chunks, num_chunks),
        FORM,
        GROUP,
        WIDTH,
        CHUNK,
        ROWS,
        OUTPUTS,
        scales_of_rows,
    )
    total *= tl.load(factors + outputs, mask=is_output, other=0.0)[:, None]
    if biases is not None:
        total += tl.load(biases + outputs, mask=is_output, other=0.0).to(tl.float32)[:, None]
    at = out + (split * num_rows + rows)[None, :].to(tl.int64) * num_outputs + outputs[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=is_row[None, :] & is_output[:, None])


@triton.jit(do_not_specialize=["splits"])
def _add(sums, biases, out, num_outputs, splits, WIDTH: tl.constexpr):
    """Adds the splits of a row in order, and the bias."""
    row = tl.program_id(0).to(tl.int64)
    outputs = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_output = outputs < num_outputs
    total = tl.zeros([WIDTH], tl.float32)
    for split in range(splits):
        at = (split * tl.num_programs(0) + row) * num_outputs
        total += tl.load(sums + at + outputs, mask=is_output, other=0.0)
    if biases is not None:
        total += tl.load(biases + outputs, mask=is_output, other=0.0).to(tl.float32)
    tl.store(out + row * num_outputs + outputs, total.to(out.dtype.element_ty), mask=is_output)


def unpacked(weight: GroupedWeight, dtype: torch.dtype) -> Tensor:
    """The weights [N, K]."""
    num_outputs = len(weight.codes)
    out = torch.empty(num_outputs, weight.num_inputs, dtype=dtype, device=weight.codes.device)
    num_chunks = triton.cdiv(weight.num_inputs, CHUNK)
    _unpack[(triton.cdiv(num_outputs, _OUTPUTS), num_chunks)](
        weight.codes,
        weight.scales,
        weight.outputs,
        out,
        weight.num_inputs,
        num_outputs,
        FORM=weight.form,
        GROUP=weight.group,
        WIDTH=weight.width,
        CHUNK=CHUNK,
        OUTPUTS=_OUTPUTS,
    )
    return out


@triton.jit
def _unpack(
    codes,
    scales,
    factors,
    out,
    num_inputs,
    num_outputs,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    PER_BYTE: tl.constexpr = 2 if FORM == "int4" or FORM == "fp4" else 1
    PER_WORD: tl.constexpr = CHUNK if FORM == "fp4" else GROUP  # inputs
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output, places = outputs < num_outputs, tl.arange(0, WIDTH)
    wide = outputs.to(tl.int64)[:, None]
    codes_at = codes + wide * (tl.num_programs(1) * (CHUNK // PER_BYTE)) + places[None, :]
    factor = tl.load(factors + outputs, mask=is_output, other=0.0)[:, None]
    for part in tl.static_range(CHUNK // (WIDTH * PER_BYTE)):
        first = tl.program_id(1) * CHUNK + part * WIDTH * PER_BYTE
        octets = tl.load(codes_at + first // PER_BYTE, mask=is_output[:, None], other=0)
        for half in tl.static_range(PER_BYTE):
            k = first + half * WIDTH
            words = tl.load(scales + k // PER_WORD * num_outputs + outputs, mask=is_output, other=0)
            words >>= (part * PER_BYTE + half) * WIDTH % PER_WORD // GROUP * 8
            some = octets
            if PER_BYTE == 2:
                some = octets >> 4 if half else octets & 15
            weights = _weights(some, words, FORM) * factor
            is_weight = is_output[:, None] & (places < num_inputs - k)[None, :]
            at = out + wide * num_inputs + k + places[None, :]
            tl.store(at, weights.to(out.dtype.element_ty), mask=is_weight)
