"""Adds what LoRA adapters add to a linear, y += B (A x), to tokens of any adapters and of none, in
two launches that are the same for every mix: a CUDA graph replays them.

    shrink     A x, in `_SPLITS` parts of the inputs; a program has 16 tokens, 16 ranks and a part
    expand     adds B times the sum of these parts; a program has 16 tokens and 64 outputs

A token names its adapter by the address of the adapter's table, which has, for each linear of the
model, the addresses of A and B and their rank. Tokens of an adapter are neighbours in a step, so
most programs find one adapter among their tokens; those without any end at once.
"""
# Triton has no type annotations, and a kernel's arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]
from torch import Tensor

_TOKENS = tl.constexpr(16)
_RANKS = tl.constexpr(16)
_DEPTH = tl.constexpr(128)
_SPLITS = tl.constexpr(8)  # a step of few tokens would occupy a GPU's cores a little otherwise
_OUTPUTS = tl.constexpr(64)


def add_low_rank(y: Tensor, x: Tensor, tables: Tensor, linear: int, max_rank: int) -> None:
    """See `kvops.ops.Backend.add_low_rank`."""
    num_tokens, num_inputs = x.shape
    num_tiles = triton.cdiv(num_tokens, _TOKENS.value)
    shape = (_SPLITS.value, num_tokens, max_rank)
    parts = torch.empty(shape, dtype=torch.float32, device=x.device)
    _shrink[(num_tiles, triton.cdiv(max_rank, _RANKS.value), _SPLITS.value)](
        x, x.stride(0), tables, parts, linear, num_tokens, num_inputs, max_rank
    )
    _expand[(num_tiles, triton.cdiv(y.shape[1], _OUTPUTS.value))](
        y, y.stride(0), tables, parts, linear, num_tokens, y.shape[1], max_rank
    )


@triton.jit
def _entry(table, linear, which):
    return tl.load(table.to(tl.pointer_type(tl.int64)) + linear * 3 + which)


@triton.jit(do_not_specialize=["linear", "num_tokens"])
def _shrink(x, stride, tables, parts, linear, num_tokens, num_inputs, max_rank):
    tile, block, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    tokens = tile * _TOKENS + tl.arange(0, _TOKENS)
    adapters = tl.load(tables + tokens, tokens < num_tokens, other=0)
    adapter = tl.max(adapters, axis=0)
    if adapter == 0:
        return
    ranks = block * _RANKS + tl.arange(0, _RANKS)
    total = tl.zeros((_TOKENS, _RANKS), tl.float32)
    while adapter != 0:
        if block * _RANKS < _entry(adapter, linear, 2):
            down = _entry(adapter, linear, 0).to(x.dtype)
            is_own = (adapters == adapter)[:, None]
            for begin in range(split * _DEPTH, num_inputs, _SPLITS * _DEPTH):
                columns = begin + tl.arange(0, _DEPTH)
                inside = columns < num_inputs
                places = tokens.to(tl.int64)[:, None] * stride + columns[None, :]
                values = tl.load(x + places, is_own & inside[None, :], other=0.0)
                of_rank = ranks.to(tl.int64)[None, :] * num_inputs + columns[:, None]
                weights = tl.load(down + of_rank, inside[:, None], other=0.0)
                total = tl.dot(values, weights, total, input_precision="ieee")
        adapters = tl.where(adapters == adapter, 0, adapters)
        adapter = tl.max(adapters, axis=0)
    to = parts + (split * num_tokens + tokens).to(tl.int64)[:, None] * max_rank + ranks[None, :]
    tl.store(to, total, (tokens < num_tokens)[:, None] & (ranks < max_rank)[None, :])


@triton.jit(do_not_specialize=["linear", "num_tokens"])
def _expand(y, stride, tables, parts, linear, num_tokens, num_outputs, max_rank):
    tile, block = tl.program_id(0), tl.program_id(1)
    tokens = tile * _TOKENS + tl.arange(0, _TOKENS)
    adapters = tl.load(tables + tokens, tokens < num_tokens, other=0)
    adapter = tl.max(adapters, axis=0)
    if adapter == 0:
        return
    outputs = block * _OUTPUTS + tl.arange(0, _OUTPUTS)
    inside, is_adapted = outputs < num_outputs, adapters != 0
    total = tl.zeros((_TOKENS, _OUTPUTS), tl.float32)
    while adapter != 0:
        rank = _entry(adapter, linear, 2)
        up = _entry(adapter, linear, 1).to(y.dtype)
        is_own = (adapters == adapter)[:, None]
        for begin in range(0, rank, _RANKS):
            ranks = begin + tl.arange(0, _RANKS)
            low = tl.zeros((_TOKENS, _RANKS), tl.float32)
            for split in range(_SPLITS):
                at = (split * num_tokens + tokens).to(tl.int64)[:, None] * max_rank
                low += tl.load(parts + at + ranks[None, :], is_own, other=0.0)
            of_output = outputs.to(tl.int64)[None, :] * rank + ranks[:, None]
            weights = tl.load(up + of_output, inside[None, :], other=0.0)
            total = tl.dot(low.to(weights.dtype), weights, total, input_precision="ieee")
        adapters = tl.where(adapters == adapter, 0, adapters)
        adapter = tl.max(adapters, axis=0)
    places = y + tokens.to(tl.int64)[:, None] * stride + outputs[None, :]
    is_changed = is_adapted[:, None] & inside[None, :]
    before = tl.load(places, is_changed, other=0.0)
    added = total.to(before.dtype).to(tl.float32)  # rounded as the output of a linear of its own
    tl.store(places, (before.to(tl.float32) + added).to(before.dtype), is_changed)
