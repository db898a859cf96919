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
    progress: Tensor
    """Of each row the least key that `choose` finds, and how many of its parts have come to the end
    of `choose` and of `race`, [3, rows]; `look` sets it to 0."""


class Filters(NamedTuple):
    """The temperature and the filters of a draw."""

    temperature: Tensor
    least: Tensor
    top_k: Tensor
    top_p: Tensor


class Numbers(NamedTuple):
    """The seed and the position from which the random numbers of a draw follow."""

    seed: Tensor
    sequence_index: Tensor
    position: Tensor


class Winners(NamedTuple):
    """The chunk of each part of a row that finishes first, and its time."""

    times: Tensor
    chunks: Tensor


@triton.jit
def _largest_of(logits, which, row, num_rows, PARTS: tl.constexpr):
    parts = tl.arange(0, PARTS)
    places = logits.maxima + (which * num_rows + row) * logits.num_parts + parts
    return tl.max(tl.load(places, parts < logits.num_parts, other=-INFINITY), axis=0)


@triton.jit
def row_of(logits, row, num_rows, PARTS: tl.constexpr, ADJUSTED: tl.constexpr):
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
def scaled_logits(logits, row, columns, largest, temperature, holds, ADJUSTED: tl.constexpr):
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
    if part == 0:
        for which in range(3):
            tl.store(logits.progress + which * num_rows + row, 0)
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


@triton.jit
def comes_last(logits, which, row, num_rows):
    """Whether this program is the last of its row here. Values that the others have stored before
    are visible to it then."""
    tl.debug_barrier()
    num_others = tl.atomic_add(logits.progress + which * num_rows + row, 1, sem="acq_rel")
    return num_others == logits.num_parts - 1


@triton.jit
def _kept_weights(logits, filters, row, scaled):
    """The weights of the tokens that the filters leave; 0 of the others."""
    least = tl.load(logits.progress + row)
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
    spots,
    tokens,
    num_rows,
    PARTS: tl.constexpr,
    ADJUSTED: tl.constexpr,
):
    """Finds the chunk of 64 tokens of each part that finishes first. The part of the row that comes
    last finds the first of these chunks, and stores its token that finishes first. Without a
    temperature the likeliest token is stored; -1: the row's logits are not finite."""
    row, part = tl.program_id(0), tl.program_id(1)
    heat = tl.load(filters.temperature + row)
    is_finite, largest, holds = row_of(logits, row, num_rows, PARTS, ADJUSTED)
    parts = tl.arange(0, PARTS)
    inside, places = parts < logits.num_parts, row * logits.num_parts + parts
    if (heat == 0) | (not is_finite):
        if part == 0:
            size = num_rows * logits.num_parts
            which = tl.where(holds, 0, 1) * size
            top = tl.load(logits.maxima + size + which + places, inside, other=-INFINITY)
            spot = tl.load(spots + which + places, inside, other=_NO_TOKEN)
            token = tl.min(tl.where(top == largest, spot, _NO_TOKEN), axis=0)
            tl.store(tokens + row, tl.where(is_finite, token, -1).to(tl.int64))
        return
    chunks = part * _CHUNKS + tl.arange(0, _CHUNKS)
    columns = chunks[:, None] * _CHUNK + tl.arange(0, _CHUNK)[None, :]
    scaled = scaled_logits(logits, row, columns, largest, heat, holds, ADJUSTED)
    amounts = tl.sum(_kept_weights(logits, filters, row, scaled), axis=1)
    finished = _finishes(numbers, row, chunks + _CHUNK, amounts)
    first = tl.min(finished, axis=0)
    spot = row * logits.num_parts + part
    tl.store(winners.times + spot, first)
    winner = tl.min(tl.where(finished == first, chunks, _NO_TOKEN), axis=0)
    tl.store(winners.chunks + spot, winner)
    if not comes_last(logits, 2, row, num_rows):
        return
    # Other programs have written these just now, so they are read from the cache that all share.
    finished = tl.load(winners.times + places, inside, other=INFINITY, cache_modifier=".cg")
    first = tl.min(finished, axis=0)
    chunk = tl.load(winners.chunks + places, inside, other=_NO_TOKEN, cache_modifier=".cg")
    chunk = tl.min(tl.where(finished == first, chunk, _NO_TOKEN), axis=0)
    within = tl.arange(0, _CHUNK)
    scaled = scaled_logits(logits, row, chunk * _CHUNK + within, largest, heat, holds, ADJUSTED)
    finished = _finishes(numbers, row, within, _kept_weights(logits, filters, row, scaled))
    won = tl.min(tl.where(finished == tl.min(finished, axis=0), within, _CHUNK), axis=0)
    tl.store(tokens + row, (chunk * _CHUNK + won).to(tl.int64))
