"""The kernels of `kvops.triton.sampling` that find which tokens top_k and top_p leave."""
# Triton has no type annotations, and a kernel's arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kvops.triton.draw_arithmetic import key, weights
from kvops.triton.sampling_kernels import PART, comes_last, row_of, scaled_logits

STEPS = tl.constexpr(16)  # distances from the largest logit, at which tokens are counted
_COLUMNS = tl.constexpr(256)  # of a part, counted at once; each has PART / 256 counts in 8 bits


class Near(NamedTuple):
    """The results of `survey`, [rows, parts, STEPS], and the scaled logits that `choose` gathers,
    [rows, vocab_size]."""

    counts: Tensor
    weights: Tensor
    gathered: Tensor


@triton.jit
def _limits(logits, filters, row):
    """The temperature of a row's draw, its top_k, its top_p, and whether these two leave out any
    tokens."""
    heat = tl.load(filters.temperature + row)
    limit, share = tl.load(filters.top_k + row), tl.load(filters.top_p + row)
    by_rank, by_weight = (limit > 0) & (limit < logits.vocab_size), share < 1
    return heat, limit, share, by_rank & (heat > 0), by_weight & (heat > 0)


@triton.jit(do_not_specialize=["num_rows"])
def survey(logits, filters, near, num_rows, PARTS: tl.constexpr, ADJUSTED: tl.constexpr):
    """Counts and, if top_p alone filters the row, weighs the tokens of a part that are closer to
    the largest logit than 16, 15, .., 1; at the distance of 16, all that min_p leaves."""
    row, part = tl.program_id(0), tl.program_id(1)
    heat, _, _, by_rank, by_weight = _limits(logits, filters, row)
    is_finite, largest, holds = row_of(logits, row, num_rows, PARTS, ADJUSTED)
    if (not (by_rank | by_weight)) | (not is_finite):
        return
    floor = key(tl.load(filters.least + row))
    steps, groups, fields = tl.arange(0, STEPS), tl.arange(0, 4), tl.arange(0, 4)
    counts = tl.zeros((4, _COLUMNS), tl.int32)
    amounts = tl.zeros((STEPS, _COLUMNS), tl.int64)
    for begin in range(part * PART, part * PART + PART, _COLUMNS):
        columns = begin + tl.arange(0, _COLUMNS)
        scaled = scaled_logits(logits, row, columns, largest, heat, holds, ADJUSTED)
        is_counted = (columns < logits.vocab_size) & (key(scaled) >= floor)
        # How many steps the token reaches, less one.
        digits = -tl.minimum(-scaled, STEPS - 1).to(tl.int32) + (STEPS - 1)
        digits = tl.where(is_counted, digits, -1)[None, :]
        # A byte for each step s, 128 + digit - s, whose highest bit is counted.
        bytes_of_4 = digits * 0x01010101 + (0x7D7E7F80 - groups * 0x04040404)[:, None]
        counts += (bytes_of_4 >> 7) & 0x01010101
        if not by_rank:
            amounts += tl.where(digits >= steps[:, None], weights(scaled)[None, :], 0)
    spot = (row * logits.num_parts + part) * STEPS
    of_fields = (counts[:, None, :] >> (fields * 8)[None, :, None]) & 0xFF
    places = groups[:, None] * 4 + fields[None, :]
    tl.store(near.counts + spot + places, tl.sum(of_fields, axis=2))
    tl.store(near.weights + spot + steps, tl.sum(amounts, axis=1))


@triton.jit(do_not_specialize=["num_rows"])
def choose(logits, filters, near, num_rows, PARTS: tl.constexpr, ADJUSTED: tl.constexpr):
    """Finds the largest key at or above which there are `top_k` tokens, and then, among these, a
    share of `top_p` of the weight. Each part gathers its tokens that may be there; the part of the
    row that comes last searches them."""
    row, part = tl.program_id(0), tl.program_id(1)
    heat, limit, share, by_rank, by_weight = _limits(logits, filters, row)
    is_finite, largest, holds = row_of(logits, row, num_rows, PARTS, ADJUSTED)
    if (not (by_rank | by_weight)) | (not is_finite):
        return
    steps, parts = tl.arange(0, STEPS), tl.arange(0, PARTS)
    places = (row * logits.num_parts + parts[:, None]) * STEPS + steps[None, :]
    inside = (parts < logits.num_parts)[:, None]
    counts = tl.load(near.counts + places, inside, other=0)
    reached = tl.sum(counts, axis=0)
    wanted = limit.to(tl.int64)
    if by_rank:
        digit = tl.sum((reached >= limit).to(tl.int32), axis=0) - 1
    else:
        sums = tl.sum(tl.load(near.weights + places, inside, other=0), axis=0)
        wanted = _share_of(tl.max(sums, axis=0), share)
        digit = tl.sum((sums >= wanted).to(tl.int32), axis=0) - 1
    digit = tl.maximum(digit, 0)
    floor = key(tl.load(filters.least + row))
    bound = floor
    if digit > 0:
        bound = tl.maximum(floor, key((-digit + STEPS).to(tl.float32)) + 1)
    gathered = near.gathered + row.to(tl.int64) * logits.vocab_size
    is_step = steps[None, :] == digit
    before = tl.sum(tl.where(is_step & (parts < part)[:, None], counts, 0))
    if tl.sum(tl.where(is_step & (parts == part)[:, None], counts, 0)) > 0:
        columns = part * PART + tl.arange(0, PART)
        scaled = scaled_logits(logits, row, columns, largest, heat, holds, ADJUSTED)
        is_near = (columns < logits.vocab_size) & (key(scaled) >= bound)
        behind = before + tl.cumsum(is_near.to(tl.int32), axis=0) - 1
        tl.store(gathered + behind, scaled, is_near)
    if not comes_last(logits, 1, row, num_rows):
        return
    num_near = tl.sum(tl.where(steps == digit, reached, 0))
    least = 0
    if by_rank:
        least = _largest_key(gathered, num_near, wanted, floor, False)
    if by_weight:
        floor = tl.maximum(floor, least)
        if by_rank:
            wanted = _share_of(_amount(gathered, num_near, floor, True), share)
        least = tl.maximum(least, _largest_key(gathered, num_near, wanted, floor, True))
    tl.store(logits.progress + row, least)


@triton.jit
def _share_of(whole, share):
    return tl.ceil(share * whole.to(tl.float64)).to(tl.int64)


@triton.jit
def _amount(gathered, num_near, floor, BY_WEIGHT: tl.constexpr):
    """The number or weight of the gathered tokens whose key is at least `floor`."""
    amounts = tl.zeros((PART,), tl.int64)
    for begin in range(0, num_near, PART):
        places = begin + tl.arange(0, PART)
        scaled = tl.load(gathered + places, places < num_near, other=0.0, cache_modifier=".cg")
        counted = (places < num_near) & (key(scaled) >= floor)
        amounts += tl.where(counted, weights(scaled) if BY_WEIGHT else 1, 0)
    return tl.sum(amounts, axis=0)


@triton.jit
def _largest_key(gathered, num_near, wanted, floor, BY_WEIGHT: tl.constexpr):
    """The largest key at or above which there is the amount `wanted`, bit after bit."""
    found = 0
    for bit in range(31):
        candidate = found + (1 << (30 - bit))
        amount = _amount(gathered, num_near, tl.maximum(candidate, floor), BY_WEIGHT)
        found = tl.where(amount >= wanted, candidate, found)
    return found
