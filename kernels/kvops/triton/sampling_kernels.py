"""The kernels of `kvops.triton.sampling`, which describes their order.

Each kernel begins by joining what the programs of the one before left for the row's parts. Rows
that do not need a kernel leave it at once. Arguments that several kernels share are named tuples;
the number of rows is beside them, because it may not be a constant of a compiled kernel.
"""
# Triton has no type annotations, and a kernel's arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from kvops.triton.draw_arithmetic import INFINITY, key, penalized, times, uniforms, weights

PART = tl.constexpr(4096)
CANDIDATES = tl.constexpr(16)
COUNTS = tl.constexpr(17)  # of a part in each step of a search
_COLUMNS = tl.constexpr(256)  # of a part, counted at once; each has PART / 256 counts in 8 bits
_CHUNK = tl.constexpr(64)
_CHUNKS = tl.constexpr(64)  # of a part
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)
_BANNED = tl.constexpr(2)


class Logits(NamedTuple):
    """The rows' logits; `raw`: the model's. `adjusted` and `maxima`: the results of `look`."""

    raw: Tensor
    stride: int
    vocab_size: int
    num_parts: int
    state: Tensor
    slot: Tensor
    adjusted: Tensor
    flags: Tensor
    maxima: Tensor


class Filters(NamedTuple):
    """`least_keys`: the results of `search`, by number and by weight."""

    temperature: Tensor
    least: Tensor
    top_k: Tensor
    top_p: Tensor
    least_keys: Tensor


class Numbers(NamedTuple):
    """The seed and the position from which the random numbers of a draw follow."""

    seed: Tensor
    sequence_index: Tensor
    position: Tensor


class Winners(NamedTuple):
    """The result of `race`: the chunk of each part that finishes first, and when."""

    times: Tensor
    chunks: Tensor


@triton.jit
def _largest_of(logits, which, row, num_rows, PARTS: tl.constexpr):
    parts = tl.arange(0, PARTS)
    places = logits.maxima + (which * num_rows + row) * logits.num_parts + parts
    return tl.max(tl.load(places, parts < logits.num_parts, other=-INFINITY), axis=0)


@triton.jit
def _row_of(logits, row, num_rows, PARTS: tl.constexpr, ADJUSTED: tl.constexpr):
    """Whether the row's logits are finite, the largest adjusted one, and whether its bans hold:
    they do not if no token would be left."""
    largest = _largest_of(logits, 0, row, num_rows, PARTS)
    is_finite = (largest < INFINITY) & (largest > -INFINITY)
    holds = True
    if ADJUSTED:
        largest = _largest_of(logits, 1, row, num_rows, PARTS)
        holds = largest > -INFINITY
        if not holds:
            largest = _largest_of(logits, 2, row, num_rows, PARTS)
    return is_finite & (largest > -INFINITY), largest, holds


@triton.jit
def _scaled(logits, row, columns, largest, temperature, holds, ADJUSTED: tl.constexpr):
    """The scaled logits of some columns; behind the row's end -inf."""
    inside = columns < logits.vocab_size
    place = logits.raw + tl.load(logits.state + row).to(tl.int64) * logits.stride
    if ADJUSTED:
        table = tl.load(logits.slot + row).to(tl.int64)
        if table >= 0:
            place = logits.adjusted + row.to(tl.int64) * logits.vocab_size
        values = tl.load(place + columns, inside, other=-INFINITY)
        if (table >= 0) & holds:
            marks = tl.load(logits.flags + table * logits.vocab_size + columns, inside, other=0)
            values = tl.where((marks & _BANNED) != 0, -INFINITY, values)
    else:
        values = tl.load(place + columns, inside, other=-INFINITY)
    return (values - largest) / temperature


@triton.jit(do_not_specialize=["num_rows"])
def look(
    logits,
    num_rows,
    spots,
    repetition,
    frequency,
    presence,
    biases,
    counts,
    ADJUSTED: tl.constexpr,
):
    """Largest logits of a part: of the model (inf for NaN), with all adjustments, and without bans;
    and where the last two are first. Stores the adjusted logits without bans."""
    row, part = tl.program_id(0), tl.program_id(1)
    columns = part * PART + tl.arange(0, PART)
    inside = columns < logits.vocab_size
    place = logits.raw + tl.load(logits.state + row).to(tl.int64) * logits.stride
    values = tl.load(place + columns, inside, other=-INFINITY)
    spot = row * logits.num_parts + part
    largest_to = logits.maxima + spot
    tl.store(largest_to, tl.max(tl.where(values == values, values, INFINITY), axis=0))
    open_values = values
    if ADJUSTED:
        table = tl.load(logits.slot + row).to(tl.int64)
        if table >= 0:
            here = table * logits.vocab_size + columns
            marks = tl.load(logits.flags + here, inside, other=0)
            count = tl.load(counts + here, inside, other=0)
            open_values += tl.load(biases + here, inside, other=0.0)
            lowered = penalized(
                open_values,
                (count - 1).to(tl.float32),
                tl.load(repetition + row),
                tl.load(frequency + row),
                tl.load(presence + row),
            )
            is_seen = (count > 0) & (open_values > -INFINITY)
            open_values = tl.where(is_seen, lowered, open_values)
            open_values = tl.where((marks & 1) != 0, -INFINITY, open_values)
            adjusted_to = logits.adjusted + row.to(tl.int64) * logits.vocab_size
            tl.store(adjusted_to + columns, open_values, inside)
            values = tl.where((marks & _BANNED) != 0, -INFINITY, open_values)
    size = num_rows * logits.num_parts
    _store_first_largest(values, columns, largest_to + size, spots + spot)
    if ADJUSTED:
        _store_first_largest(open_values, columns, largest_to + 2 * size, spots + size + spot)


@triton.jit
def _store_first_largest(values, columns, largest_to, spot_to):
    largest = tl.max(values, axis=0)
    tl.store(largest_to, largest)
    tl.store(spot_to, tl.min(tl.where(values == largest, columns, _NO_TOKEN), axis=0))


@triton.jit(do_not_specialize=["num_rows", "step", "shift"])
def search(
    logits,
    filters,
    num_rows,
    parts,
    found,
    wholes,
    step,
    shift,
    BY_WEIGHT: tl.constexpr,
    PARTS: tl.constexpr,
    ADJUSTED: tl.constexpr,
):
    """Finds the largest key at or above which there are `top_k` tokens, or a share of `top_p` of
    the weight. Step n has its bits above `shift`; the last step, whose `shift` is negative, only
    joins what the one before has counted. `parts`: what each part has at or above each candidate,
    and above all of them."""
    row, part = tl.program_id(0), tl.program_id(1)
    heat = tl.load(filters.temperature + row)
    limit, share = tl.load(filters.top_k + row), tl.load(filters.top_p + row)
    is_ranked = (share < 1) if BY_WEIGHT else (limit > 0) & (limit < logits.vocab_size)
    if (heat == 0) | (not is_ranked):
        return
    candidates, all_parts = tl.arange(0, CANDIDATES), tl.arange(0, PARTS)
    size = num_rows * logits.num_parts * COUNTS
    spot = (row * logits.num_parts + part) * COUNTS
    to = parts + step % 2 * size + spot
    prefix, above = 0, tl.zeros((), parts.dtype.element_ty)
    if step > 1:
        prefix = tl.load(found + (step - 1) * num_rows + row)
    if step > 0:
        before = parts + (step - 1) % 2 * size
        places = (row * logits.num_parts + all_parts[:, None]) * COUNTS + candidates[None, :]
        counts = tl.load(before + places, (all_parts < logits.num_parts)[:, None], other=0)
        sums = tl.sum(counts, axis=0)
        wanted = limit
        if BY_WEIGHT:
            whole = tl.sum(tl.where(candidates == 0, sums, 0), axis=0)
            if step > 1:
                whole = tl.load(wholes + row)
            elif part == 0:
                tl.store(wholes + row, whole)
            wanted = tl.ceil(share * whole.to(tl.float64)).to(tl.int64)
        digit = tl.maximum(tl.sum((sums >= wanted).to(tl.int32), axis=0) - 1, 0)
        prefix += digit << (shift + 4)
        if part == 0:
            tl.store(found + step * num_rows + row, prefix)
        if shift < 0:
            tl.store(filters.least_keys + (num_rows if BY_WEIGHT else 0) + row, prefix)
            return
        above = tl.load(before + spot + digit + 1)
        if above == tl.load(before + spot + digit):  # no token of the part is between candidates
            tl.store(to + candidates, above + tl.zeros_like(sums))
            tl.store(to + CANDIDATES, above)
            return
    is_finite, largest, holds = _row_of(logits, row, num_rows, PARTS, ADJUSTED)
    if not is_finite:
        return
    tl.store(to + CANDIDATES, above)
    floor = key(tl.load(filters.least + row))
    if BY_WEIGHT:
        floor = tl.maximum(floor, tl.load(filters.least_keys + row))
    groups, fields = tl.arange(0, 4), tl.arange(0, 4)
    amounts = tl.zeros((CANDIDATES if BY_WEIGHT else 4, _COLUMNS), parts.dtype.element_ty)
    for begin in range(part * PART, part * PART + PART, _COLUMNS):
        columns = begin + tl.arange(0, _COLUMNS)
        scaled = _scaled(logits, row, columns, largest, heat, holds, ADJUSTED)
        is_counted = (columns < logits.vocab_size) & (key(scaled) >= floor)
        # How many candidates the token reaches, less one.
        digits = tl.minimum(tl.maximum((key(scaled) - prefix) >> shift, -1), CANDIDATES - 1)
        digits = tl.where(is_counted, digits, -1)[None, :]
        if BY_WEIGHT:
            amounts += tl.where(digits >= candidates[:, None], weights(scaled)[None, :], 0)
        else:  # a byte for each candidate c, 128 + digit - c, whose highest bit is counted
            bytes_of_4 = digits * 0x01010101 + (0x7D7E7F80 - groups * 0x04040404)[:, None]
            amounts += (bytes_of_4 >> 7) & 0x01010101
    if BY_WEIGHT:
        tl.store(to + candidates, tl.sum(amounts, axis=1))
    else:
        counts = (amounts[:, None, :] >> (fields * 8)[None, :, None]) & 0xFF
        tl.store(to + groups[:, None] * 4 + fields[None, :], tl.sum(counts, axis=2))


@triton.jit
def _kept_weights(filters, row, num_rows, scaled):
    """The weights of the tokens that the filters leave; 0 of the others."""
    by_rank = filters.least_keys + row
    least = tl.maximum(tl.load(by_rank), tl.load(by_rank + num_rows))
    is_kept = key(scaled) >= tl.maximum(key(tl.load(filters.least + row)), least)
    return tl.where(is_kept, weights(scaled), 0)


@triton.jit
def _finishes(numbers, row, i, amounts):
    """When the tokens or chunks of these weights finish, by the i-th random numbers."""
    drawn = uniforms(
        tl.load(numbers.seed + row),
        tl.load(numbers.sequence_index + row),
        tl.load(numbers.position + row),
        i,
    )
    return times(drawn, amounts)


@triton.jit(do_not_specialize=["num_rows"])
def race(
    logits,
    filters,
    numbers,
    winners,
    num_rows,
    PARTS: tl.constexpr,
    ADJUSTED: tl.constexpr,
):
    """The chunk of 64 tokens of each part that finishes first."""
    row, part = tl.program_id(0), tl.program_id(1)
    heat = tl.load(filters.temperature + row)
    if heat == 0:
        return
    is_finite, largest, holds = _row_of(logits, row, num_rows, PARTS, ADJUSTED)
    if not is_finite:
        return
    chunks = part * _CHUNKS + tl.arange(0, _CHUNKS)
    columns = chunks[:, None] * _CHUNK + tl.arange(0, _CHUNK)[None, :]
    scaled = _scaled(logits, row, columns, largest, heat, holds, ADJUSTED)
    amounts = tl.sum(_kept_weights(filters, row, num_rows, scaled), axis=1)
    finished = _finishes(numbers, row, chunks + _CHUNK, amounts)
    first = tl.min(finished, axis=0)
    spot = row * logits.num_parts + part
    tl.store(winners.times + spot, first)
    winner = tl.min(tl.where(finished == first, chunks, _NO_TOKEN), axis=0)
    tl.store(winners.chunks + spot, winner)


@triton.jit(do_not_specialize=["num_rows"])
def finish(
    logits,
    filters,
    numbers,
    winners,
    num_rows,
    spots,
    tokens,
    PARTS: tl.constexpr,
    ADJUSTED: tl.constexpr,
):
    """Stores the row's token; -1: its logits are not finite."""
    row, parts = tl.program_id(0), tl.arange(0, PARTS)
    is_finite, largest, holds = _row_of(logits, row, num_rows, PARTS, ADJUSTED)
    if not is_finite:
        tl.store(tokens + row, -1)
        return
    inside = parts < logits.num_parts
    places = row * logits.num_parts + parts
    heat = tl.load(filters.temperature + row)
    if heat == 0:
        size = num_rows * logits.num_parts
        which = tl.where(holds, 0, 1) * size
        top = tl.load(logits.maxima + size + which + places, inside, other=-INFINITY)
        spot = tl.load(spots + which + places, inside, other=_NO_TOKEN)
        token = tl.min(tl.where(top == largest, spot, _NO_TOKEN), axis=0)
        tl.store(tokens + row, token.to(tl.int64))
        return
    finished = tl.load(winners.times + places, inside, other=INFINITY)
    first = tl.min(finished, axis=0)
    chunk = tl.load(winners.chunks + places, inside, other=_NO_TOKEN)
    chunk = tl.min(tl.where(finished == first, chunk, _NO_TOKEN), axis=0)
    within = tl.arange(0, _CHUNK)
    scaled = _scaled(logits, row, chunk * _CHUNK + within, largest, heat, holds, ADJUSTED)
    amounts = _kept_weights(filters, row, num_rows, scaled)
    finished = _finishes(numbers, row, within, amounts)
    won = tl.min(tl.where(finished == tl.min(finished, axis=0), within, _CHUNK), axis=0)
    tl.store(tokens + row, (chunk * _CHUNK + won).to(tl.int64))
