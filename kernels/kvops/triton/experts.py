"""Layers of experts: the rows of a step, grouped by the expert that computes them.

    places of 4 rows, 2 choices each     sorted by expert        tiles of LINES places
    row 0: experts 1, 3                  1: rows 0, 2            expert 1  | 0 2 |
    row 1: experts 2, 3                  2: rows 1               expert 2  | 1   |
    row 2: experts 1, 3                  3: rows 0, 1, 2, 3      expert 3  | 0 1 2 3 |
    row 3: experts 3, 5                  5: rows 3               expert 5  | 3   |

A program computes a tile and some outputs of its expert. So each expert's weights are read once for
all of its rows, and no program waits for another expert. The host does not wait for the router:
shapes bound the number of tiles, and programs beyond the last one end at once.

An output has one order of accumulation, whatever the step: a tile always has the same number of
lines, some of them empty. A row's outputs are added in the order of the experts.
"""
# Triton has no type annotations, and a kernel's arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvops.experts import ExpertWeights
from kvops.grouped import CHUNK, GroupedWeight
from kvops.triton.expert_tiles import Shape, Tiles, tiles_for
from kvops.triton.linears import sums

_SUM_WIDTH = 1024


def experts(
    x: Tensor, weights: ExpertWeights, chosen: Tensor, shares: Tensor, tiles: Tiles | None = None
) -> Tensor:
    """The experts' outputs for x [T, hidden]. `chosen`, `shares`: [T, top_k], from
    `ExpertWeights.choose`. Without `tiles`, the table chooses them."""
    if tiles is None:
        tiles = tiles_for(gpu_of(x.device), shape_of(weights, x.dtype))
    num_rows, hidden = x.shape
    num_experts, width, top_k = len(weights.router), weights.width, weights.top_k
    num_places = num_rows * top_k
    chosen, order = chosen.sort(dim=1)
    shares = shares.gather(1, order)
    by_expert, places = chosen.view(-1).sort(stable=True)
    bounds = torch.arange(num_experts + 1, device=x.device)
    begins = torch.searchsorted(by_expert, bounds)
    # A tile is full, or the last one of an expert.
    num_tiles = num_places // tiles.lines + min(num_experts, num_places)
    tiling = {
        "NUM_EXPERTS": num_experts,
        "EXPERTS": triton.next_power_of_2(num_experts),
        "LINES": tiles.lines,
        "OUTPUTS": tiles.outputs,
        "INPUTS": tiles.input_bytes // x.element_size(),
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
    }
    gated = x.new_empty(num_places, width)
    outs = x.new_empty(num_places, hidden, dtype=torch.float32)
    _gate_up[(num_tiles, triton.cdiv(width, tiles.outputs))](
        x.contiguous(),
        *_tensors(weights.gate_up),
        weights.gate_up_bias,
        places,
        begins,
        gated,
        hidden,
        width,
        weights.alpha,
        weights.limit,
        TOP_K=top_k,
        CLAMPED=weights.limit > 0,
        **_packing(weights.gate_up),
        **tiling,
    )
    _down[(num_tiles, triton.cdiv(hidden, tiles.outputs))](
        gated,
        *_tensors(weights.down),
        weights.down_bias,
        places,
        begins,
        shares.contiguous(),
        outs,
        width,
        hidden,
        **_packing(weights.down),
        **tiling,
    )
    total = torch.empty_like(x, memory_format=torch.contiguous_format)
    _add[(num_rows, triton.cdiv(hidden, _SUM_WIDTH))](
        outs, total, hidden, TOP_K=top_k, WIDTH=_SUM_WIDTH
    )
    return total


@cache
def gpu_of(device: torch.device) -> str:
    """The name of the GPU for the table of tiles; empty in Triton's interpreter."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


def shape_of(weights: ExpertWeights, dtype: torch.dtype) -> Shape:
    form = str(dtype).removeprefix("torch.")
    if isinstance(weights.gate_up, GroupedWeight):
        form = weights.gate_up.form
    num_experts, hidden = weights.router.shape
    return Shape(num_experts, hidden, weights.width, form)


def _tensors(weight: Tensor | GroupedWeight) -> tuple[Tensor | None, ...]:
    """Weights, or codes with the scales of groups and of outputs."""
    if isinstance(weight, GroupedWeight):
        return weight.codes, weight.scales, weight.outputs
    return weight, None, None


def _packing(weight: Tensor | GroupedWeight) -> dict[str, str | int | None]:
    if isinstance(weight, GroupedWeight):
        return {"FORM": weight.form, "GROUP": weight.group, "WIDTH": weight.width, "CHUNK": CHUNK}
    return {"FORM": None, "GROUP": 0, "WIDTH": 0, "CHUNK": 0}


@triton.jit
def _unpacked(
    x_at,
    is_line,
    codes,
    scales,
    factors,
    outputs,
    is_output,
    num_inputs,
    num_outputs,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    LINES: tl.constexpr,
    OUTPUTS: tl.constexpr,
):
    """The products [lines, outputs] with quantized weights."""
    last = tl.cdiv(num_inputs, CHUNK)
    total = sums(
        x_at, is_line, codes, scales, outputs, is_output, num_inputs, num_outputs, 0, last,
        FORM, GROUP, WIDTH, CHUNK, LINES, OUTPUTS
    )  # fmt: skip
    return tl.trans(total * tl.load(factors + outputs, mask=is_output, other=0.0)[:, None])


@triton.jit
def _tile(begins, NUM_EXPERTS: tl.constexpr, EXPERTS: tl.constexpr, LINES: tl.constexpr):
    """Return the expert of this program's tile, and the tile's first place and the end of the
    expert's places in the order of experts; there is no tile if the first is not below the end."""
    tile = tl.program_id(0)
    i = tl.arange(0, EXPERTS)
    is_expert = i < NUM_EXPERTS
    first = tl.load(begins + i, mask=is_expert, other=0).to(tl.int32)
    end = tl.load(begins + i + 1, mask=is_expert, other=0).to(tl.int32)
    num_tiles = (end - first + LINES - 1) // LINES
    ends = tl.cumsum(num_tiles, axis=0)
    expert = tl.sum((ends <= tile).to(tl.int32), axis=0)
    mine = i == expert  # of no expert: all tiles are before this one
    before = tl.sum(tl.where(i < expert, num_tiles, 0), axis=0)
    begin = tl.sum(tl.where(mine, first, 0), axis=0) + (tile - before) * LINES
    return expert, begin, tl.sum(tl.where(mine, end, 0), axis=0)


@triton.jit
def _gate_up(
    x,
    weights,
    scales,
    factors,
    biases,
    places,
    begins,
    out,
    hidden,
    width,
    alpha,
    limit,
    TOP_K: tl.constexpr,
    CLAMPED: tl.constexpr,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    LINES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Computes gate and up of a tile, and their activation. `out`: [places, width], in the order of
    experts. `weights`: [experts, 2 * width, hidden], the gate's outputs first."""
    expert, begin, end = _tile(begins, NUM_EXPERTS, EXPERTS, LINES)
    if begin >= end:
        return
    lines = begin + tl.arange(0, LINES)
    is_line = lines < end
    rows = tl.load(places + lines, mask=is_line, other=0) // TOP_K
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < width
    inputs = tl.arange(0, INPUTS)
    first = expert.to(tl.int64) * 2 * width
    if FORM is not None:
        row_at, total = x + rows.to(tl.int64) * hidden, NUM_EXPERTS * 2 * width
        gate = _unpacked(
            row_at, is_line, weights, scales, factors, first + outputs, is_output, hidden, total,
            FORM, GROUP, WIDTH, CHUNK, LINES, OUTPUTS
        )  # fmt: skip
        up = _unpacked(
            row_at, is_line, weights, scales, factors, first + width + outputs, is_output, hidden,
            total, FORM, GROUP, WIDTH, CHUNK, LINES, OUTPUTS
        )  # fmt: skip
    else:
        gate_at = weights + (first + outputs)[None, :] * hidden + inputs[:, None]
        up_at = weights + (first + width + outputs)[None, :] * hidden + inputs[:, None]
        x_at = x + rows.to(tl.int64)[:, None] * hidden + inputs[None, :]
        gate = tl.zeros([LINES, OUTPUTS], tl.float32)
        up = tl.zeros([LINES, OUTPUTS], tl.float32)
        for k in range(0, hidden, INPUTS):
            is_input = inputs < hidden - k
            part = tl.load(x_at + k, mask=is_line[:, None] & is_input[None, :], other=0.0)
            is_weight = is_output[None, :] & is_input[:, None]
            gate_part = tl.load(gate_at + k, mask=is_weight, other=0.0)
            up_part = tl.load(up_at + k, mask=is_weight, other=0.0)
            gate = tl.dot(part, gate_part, acc=gate, input_precision="ieee")
            up = tl.dot(part, up_part, acc=up, input_precision="ieee")
    if biases is not None:
        bias_at = biases + first + outputs
        gate += tl.load(bias_at, mask=is_output, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_at + width, mask=is_output, other=0.0).to(tl.float32)[None, :]
    # Rounded as the outputs of two linears are.
    gate = gate.to(out.dtype.element_ty).to(tl.float32)
    up = up.to(out.dtype.element_ty).to(tl.float32)
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit) + 1.0
        gated = gate / (1.0 + tl.exp(-alpha * gate)) * up
    else:
        gated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(
        out + lines.to(tl.int64)[:, None] * width + outputs[None, :],
        gated.to(out.dtype.element_ty),
        mask=is_line[:, None] & is_output[None, :],
    )


@triton.jit
def _down(
    x,
    weights,
    scales,
    factors,
    biases,
    places,
    begins,
    shares,
    out,
    width,
    hidden,
    FORM: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS: tl.constexpr,
    LINES: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Computes the down linear of a tile, times the row's share of the expert. `x`: [places,
    width], in the order of experts. `out`: fp32 [places, hidden], in the order of rows."""
    expert, begin, end = _tile(begins, NUM_EXPERTS, EXPERTS, LINES)
    if begin >= end:
        return
    lines = begin + tl.arange(0, LINES)
    is_line = lines < end
    outputs = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = outputs < hidden
    inputs = tl.arange(0, INPUTS)
    first = expert.to(tl.int64) * hidden
    if FORM is not None:
        total = _unpacked(
            x + lines.to(tl.int64) * width, is_line, weights, scales, factors, first + outputs,
            is_output, width, NUM_EXPERTS * hidden, FORM, GROUP, WIDTH, CHUNK, LINES, OUTPUTS
        )  # fmt: skip
    else:
        weights_at = weights + (first + outputs)[None, :] * width + inputs[:, None]
        x_at = x + lines.to(tl.int64)[:, None] * width + inputs[None, :]
        total = tl.zeros([LINES, OUTPUTS], tl.float32)
        for k in range(0, width, INPUTS):
            is_input = inputs < width - k
            part = tl.load(x_at + k, mask=is_line[:, None] & is_input[None, :], other=0.0)
            is_weight = is_output[None, :] & is_input[:, None]
            weight = tl.load(weights_at + k, mask=is_weight, other=0.0)
            total = tl.dot(part, weight, acc=total, input_precision="ieee")
    if biases is not None:
        bias = tl.load(biases + first + outputs, mask=is_output, other=0.0)
        total += bias.to(tl.float32)[None, :]
    total = total.to(x.dtype.element_ty).to(tl.float32)
    spots = tl.load(places + lines, mask=is_line, other=0).to(tl.int64)
    share = tl.load(shares + spots, mask=is_line, other=0.0)
    tl.store(
        out + spots[:, None] * hidden + outputs[None, :],
        total * share[:, None],
        mask=is_line[:, None] & is_output[None, :],
    )


@triton.jit
def _add(outs, total, hidden, TOP_K: tl.constexpr, WIDTH: tl.constexpr):
    """Adds the outputs of a row's experts, which lie in the order of experts."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    is_output = i < hidden
    out = tl.zeros([WIDTH], tl.float32)
    for place in range(TOP_K):
        out += tl.load(outs + (row * TOP_K + place) * hidden + i, mask=is_output, other=0.0)
    tl.store(total + row * hidden + i, out.to(total.dtype.element_ty), mask=is_output)
