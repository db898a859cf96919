"""Draws tokens from logits, with the bits of `services.engine.sampling.sampler`, whose arithmetic
(`services.engine.sampling.arithmetic`) is repeated here, operation for operation. The compiler may
fuse no operations (`enable_fp_fusion`), and sums are of whole numbers, in any order.

    _look      the largest logit of each part of a row; penalties and biases applied before
    _search    one step of a search for the least scaled logit that top_k leaves, then top_p: four
               bits of it, by the number or weight of the tokens at or above 16 candidates
    _race      the chunk of 64 tokens of each part that finishes first
    _finish    the chunk that finishes first of all, and its token that does; or the likeliest token

Programs are (row, part): a part is 4,096 tokens. Each kernel begins by joining what the programs of
the one before left for the row's parts. Rows that do not need a kernel leave it at once.

A scaled logit is at most 0; its *key* is a whole number that grows with it.
"""
# Triton has no type annotations, and a kernel's arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvops.draws import DRAW_DTYPES, DrawTensors, PenaltyTables

_CHUNK = tl.constexpr(64)
_PART = tl.constexpr(4096)
_CHUNKS = tl.constexpr(64)  # of a part
_CANDIDATES = tl.constexpr(16)
_BITS = 4
_TOP_SHIFT = 28
_NO_TOKEN = tl.constexpr(0x7FFFFFFF)
_BANNED = tl.constexpr(2)
_INFINITY = tl.constexpr(float("inf"))
_LARGEST = tl.constexpr(3.4028234663852886e38)


def sample(logits: Tensor, draws: DrawTensors, tables: PenaltyTables | None) -> Tensor:
    """See `kvops.ops.Backend.sample`."""
    num_draws, vocab_size = len(draws.state), logits.shape[1]
    num_parts = triton.cdiv(vocab_size, _PART.value)
    device = logits.device
    is_adjusted = tables is not None
    adjusted = torch.empty((num_draws if is_adjusted else 0, vocab_size), device=device)
    maxima = torch.empty((3, num_draws, num_parts), device=device)
    spots = torch.empty((2, num_draws, num_parts), dtype=torch.int32, device=device)
    tokens = torch.empty(num_draws, dtype=torch.int64, device=device)
    least_keys = torch.zeros((2, num_draws), dtype=torch.int64, device=device)
    flags = tables.flags if tables else spots
    row = (logits, logits.stride(0), vocab_size, num_draws, num_parts)
    where = (draws.state, draws.slot, adjusted, flags, maxima)
    shape = {"PARTS": triton.next_power_of_2(num_parts), "ADJUSTED": is_adjusted}
    exact = {"enable_fp_fusion": False}
    grid = (num_draws, num_parts)
    _look[grid](
        *row,
        *where,
        spots,
        draws.repetition,
        draws.frequency,
        draws.presence,
        tables.biases if tables else logits,
        tables.counts if tables else spots,
        ADJUSTED=is_adjusted,
        **exact,
    )
    scaling = (draws.temperature, draws.least, draws.top_k, draws.top_p, least_keys)
    for by_weight, is_needed in ((False, draws.has_top_k), (True, draws.has_top_p)):
        if is_needed:
            sums = (2, num_draws, num_parts, _CANDIDATES.value)
            parts = torch.empty(sums, dtype=torch.int64, device=device)
            found = torch.empty(
                (_TOP_SHIFT // _BITS + 2, num_draws), dtype=torch.int64, device=device
            )
            wholes = torch.empty(num_draws, dtype=torch.int64, device=device)
            for step in range(_TOP_SHIFT // _BITS + 2):
                shift = _TOP_SHIFT - step * _BITS
                _search[grid if shift >= 0 else (num_draws, 1)](
                    *row,
                    *where,
                    *scaling,
                    parts,
                    found,
                    wholes,
                    step,
                    shift,
                    BY_WEIGHT=by_weight,
                    **shape,
                    **exact,
                )
    times = torch.empty((num_draws, num_parts), device=device)
    chunks = torch.empty((num_draws, num_parts), dtype=torch.int32, device=device)
    race = (draws.seed, draws.sequence_index, draws.position, times, chunks)
    _race[grid](*row, *where, *scaling, *race, **shape, **exact)
    _finish[(num_draws,)](*row, *where, *scaling, *race, spots, tokens, **shape, **exact)
    return tokens


def warm_up(vocab_size: int, device: str) -> None:
    """Compile the kernels for all kinds of draws; they do not depend on the number of draws."""
    zeros = {
        name: torch.zeros(2, dtype=dtype, device=device) for name, dtype in DRAW_DTYPES.items()
    }
    draws = DrawTensors(**zeros, has_top_k=True, has_top_p=True)
    logits = torch.zeros((2, vocab_size), device=device)
    tables = PenaltyTables(
        torch.zeros_like(logits),
        torch.zeros_like(logits, dtype=torch.int32),
        torch.zeros_like(logits, dtype=torch.int8),
    )
    for some in (None, tables):
        sample(logits, draws, some)


@triton.jit
def _weights(scaled):
    """floor(2^40 * e^scaled), int64."""
    binary = tl.maximum(scaled, -30.0) * 1.44269504088896341
    shifted = binary + 12582952.0
    rest = binary - (shifted - 12582952.0)
    power = rest * 0.00132647273 + 0.00967151299
    power = power * rest + 0.0555073358
    power = power * rest + 0.240222424
    power = power * rest + 0.693147004
    power = power * rest + 1.0
    bits = power.to(tl.int32, bitcast=True) + (shifted.to(tl.int32, bitcast=True) << 23)
    return bits.to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def _exponentials(u):
    """-log(1 - u), fp32."""
    is_small = u < 0.25
    bits = (1.0 - u).to(tl.int32, bitcast=True)
    k = (bits - 0x3F3504F3) >> 23
    m = (bits - (k << 23)).to(tl.float32, bitcast=True)
    z = tl.div_rn(tl.where(is_small, u, 1.0 - m), tl.where(is_small, 2.0 - u, 1.0 + m))
    square = z * z
    twice = z + z
    total = square * 0.090909090909090909 + 0.11111111111111111
    total = total * square + 0.14285714285714285
    total = total * square + 0.2
    total = total * square + 0.33333333333333333
    whole = tl.where(is_small, 0.0, -(k.to(tl.float32))) * 0.693147180559945309
    return whole + (twice + twice * (square * total))


@triton.jit
def _uniforms(seed, sequence_index, position, i):
    """The i-th random numbers of a draw, as `services.engine.sampling.philox` lays them out."""
    zeros = (i - i).to(tl.uint64)
    c0, c1 = (i // 8).to(tl.uint64), zeros
    c2 = zeros + sequence_index.to(tl.uint64, bitcast=True)
    c3 = zeros + position.to(tl.uint64, bitcast=True)
    key0, key1 = zeros + seed.to(tl.uint64, bitcast=True), zeros
    multiplier0, multiplier1 = zeros + 0xD2E7470EE14C6C93, zeros + 0xCA5A826395121157
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, multiplier0), c0 * multiplier0
        high1, low1 = tl.umulhi(c2, multiplier1), c2 * multiplier1
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0 += 0x9E3779B97F4A7C15
        key1 += 0xBB67AE8584CAA73B
    word = i % 8 // 2
    output = tl.where(word == 0, c0, tl.where(word == 1, c1, tl.where(word == 2, c2, c3)))
    half = tl.where(i % 2 == 0, output & 0xFFFFFFFF, output >> 32).to(tl.uint32)
    number = (half.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.minimum(number, 0.99999994039535522)


@triton.jit
def _key(scaled):
    return (0x7FFFFFFF - (scaled.to(tl.int32, bitcast=True) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _largest_of(maxima, which, row, num_rows, num_parts, PARTS: tl.constexpr):
    parts = tl.arange(0, PARTS)
    places = (which * num_rows + row) * num_parts + parts
    return tl.max(tl.load(maxima + places, parts < num_parts, other=-_INFINITY), axis=0)


@triton.jit
def _row_of(row, maxima, num_rows, num_parts, PARTS: tl.constexpr, ADJUSTED: tl.constexpr):
    """Whether the row's logits are finite, the largest adjusted one, and whether its bans hold:
    they do not if no token would be left."""
    largest = _largest_of(maxima, 0, row, num_rows, num_parts, PARTS)
    is_finite = (largest < _INFINITY) & (largest > -_INFINITY)
    holds = True
    if ADJUSTED:
        largest = _largest_of(maxima, 1, row, num_rows, num_parts, PARTS)
        holds = largest > -_INFINITY
        if not holds:
            largest = _largest_of(maxima, 2, row, num_rows, num_parts, PARTS)
    return is_finite & (largest > -_INFINITY), largest, holds


@triton.jit
def _scaled(
    row,
    columns,
    largest,
    temperature,
    holds,
    logits,
    logits_stride,
    vocab_size,
    state,
    slot,
    adjusted,
    flags,
    ADJUSTED: tl.constexpr,
):
    """The scaled logits of some columns; behind the row's end -inf."""
    inside = columns < vocab_size
    place = logits + tl.load(state + row).to(tl.int64) * logits_stride
    if ADJUSTED:
        table = tl.load(slot + row).to(tl.int64)
        if table >= 0:
            place = adjusted + row.to(tl.int64) * vocab_size
        values = tl.load(place + columns, inside, other=-_INFINITY)
        if (table >= 0) & holds:
            marks = tl.load(flags + table * vocab_size + columns, inside, other=0)
            values = tl.where((marks & _BANNED) != 0, -_INFINITY, values)
    else:
        values = tl.load(place + columns, inside, other=-_INFINITY)
    return tl.div_rn(values - largest, temperature + tl.zeros_like(values))


@triton.jit(do_not_specialize=["num_rows"])
def _look(
    logits,
    logits_stride,
    vocab_size,
    num_rows,
    num_parts,
    state,
    slot,
    adjusted,
    flags,
    maxima,
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
    columns = part * _PART + tl.arange(0, _PART)
    inside = columns < vocab_size
    place = logits + tl.load(state + row).to(tl.int64) * logits_stride
    values = tl.load(place + columns, inside, other=-_INFINITY)
    spot = row * num_parts + part
    tl.store(maxima + spot, tl.max(tl.where(values == values, values, _INFINITY), axis=0))
    open_values = values
    if ADJUSTED:
        table = tl.load(slot + row).to(tl.int64)
        if table >= 0:
            here = table * vocab_size + columns
            marks = tl.load(flags + here, inside, other=0)
            count = tl.load(counts + here, inside, other=0)
            open_values += tl.load(biases + here, inside, other=0.0)
            penalized = _penalized(
                open_values,
                (count - 1).to(tl.float32),
                tl.load(repetition + row),
                tl.load(frequency + row),
                tl.load(presence + row),
            )
            is_seen = (count > 0) & (open_values > -_INFINITY)
            open_values = tl.where(is_seen, penalized, open_values)
            open_values = tl.where((marks & 1) != 0, -_INFINITY, open_values)
            tl.store(adjusted + row.to(tl.int64) * vocab_size + columns, open_values, inside)
            values = tl.where((marks & _BANNED) != 0, -_INFINITY, open_values)
    size = num_rows * num_parts
    _store_first_largest(values, columns, maxima + size + spot, spots + spot)
    if ADJUSTED:
        _store_first_largest(open_values, columns, maxima + 2 * size + spot, spots + size + spot)


@triton.jit
def _store_first_largest(values, columns, largest_to, spot_to):
    largest = tl.max(values, axis=0)
    tl.store(largest_to, largest)
    tl.store(spot_to, tl.min(tl.where(values == largest, columns, _NO_TOKEN), axis=0))


@triton.jit
def _penalized(values, count, repetition, frequency, presence):
    """As `services.engine.sampling.adjustment`; a count of 0: the token is in the prompt only."""
    scaled = tl.where(
        values > 0, tl.div_rn(values, repetition + tl.zeros_like(values)), values * repetition
    )
    scaled = tl.minimum(tl.maximum(scaled, -_LARGEST), _LARGEST)
    scaled = scaled - frequency * count
    return tl.where(count > 0, scaled - presence, scaled)


@triton.jit(do_not_specialize=["num_rows", "step", "shift"])
def _search(
    logits,
    logits_stride,
    vocab_size,
    num_rows,
    num_parts,
    state,
    slot,
    adjusted,
    flags,
    maxima,
    temperature,
    least,
    top_k,
    top_p,
    least_keys,
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
    joins what the one before has counted."""
    row, part = tl.program_id(0), tl.program_id(1)
    heat = tl.load(temperature + row)
    limit, share = tl.load(top_k + row), tl.load(top_p + row)
    is_ranked = (share < 1) if BY_WEIGHT else (limit > 0) & (limit < vocab_size)
    if (heat == 0) | (not is_ranked):
        return
    candidates, all_parts = tl.arange(0, _CANDIDATES), tl.arange(0, PARTS)
    size = num_rows * num_parts * _CANDIDATES
    prefix = tl.full((), 0, tl.int64)
    if step > 0:
        places = (row * num_parts + all_parts[:, None]) * _CANDIDATES + candidates[None, :]
        places += (step - 1) % 2 * size
        sums = tl.sum(tl.load(parts + places, (all_parts < num_parts)[:, None], other=0), axis=0)
        wanted = limit.to(tl.int64)
        if BY_WEIGHT:
            whole = tl.sum(tl.where(candidates == 0, sums, 0), axis=0)
            if step > 1:
                whole = tl.load(wholes + row)
            elif part == 0:
                tl.store(wholes + row, whole)
            wanted = tl.ceil(share * whole.to(tl.float64)).to(tl.int64)
            if step > 1:
                prefix = tl.load(found + (step - 1) * num_rows + row)
        elif step > 1:
            prefix = tl.load(found + (step - 1) * num_rows + row)
        digit = tl.maximum(tl.sum((sums >= wanted).to(tl.int64), axis=0) - 1, 0)
        prefix += digit << (shift + 4).to(tl.int64)
        if part == 0:
            tl.store(found + step * num_rows + row, prefix)
    if shift < 0:
        tl.store(least_keys + (num_rows if BY_WEIGHT else 0) + row, prefix)
        return
    is_finite, largest, holds = _row_of(row, maxima, num_rows, num_parts, PARTS, ADJUSTED)
    if not is_finite:
        return
    columns = part * _PART + tl.arange(0, _PART)
    scaled = _scaled(
        row,
        columns,
        largest,
        heat,
        holds,
        logits,
        logits_stride,
        vocab_size,
        state,
        slot,
        adjusted,
        flags,
        ADJUSTED,
    )
    keys = _key(scaled)
    counted = (columns < vocab_size) & (keys >= _key(tl.load(least + row)))
    if BY_WEIGHT:
        counted = counted & (keys >= tl.load(least_keys + row))
        weights = tl.where(counted, _weights(scaled), 0)
    else:
        weights = counted.to(tl.int64)
    place = parts + step % 2 * size + (row * num_parts + part) * _CANDIDATES
    for candidate in tl.static_range(_CANDIDATES):
        bound = prefix + (tl.full((), candidate, tl.int64) << shift.to(tl.int64))
        tl.store(place + candidate, tl.sum(tl.where(keys >= bound, weights, 0), axis=0))


@triton.jit
def _least_key(row, num_rows, least, least_keys):
    by_rank = tl.maximum(tl.load(least_keys + row), tl.load(least_keys + num_rows + row))
    return tl.maximum(_key(tl.load(least + row)), by_rank)


@triton.jit
def _times(exponentials, weights):
    """When tokens or chunks of these weights finish. Those of weight 0 never do."""
    times = tl.div_rn(exponentials, tl.maximum(weights, 1).to(tl.float32))
    return tl.where(weights > 0, times, _INFINITY)


@triton.jit(do_not_specialize=["num_rows"])
def _race(
    logits,
    logits_stride,
    vocab_size,
    num_rows,
    num_parts,
    state,
    slot,
    adjusted,
    flags,
    maxima,
    temperature,
    least,
    top_k,
    top_p,
    least_keys,
    seed,
    sequence_index,
    position,
    times,
    winners,
    PARTS: tl.constexpr,
    ADJUSTED: tl.constexpr,
):
    row, part = tl.program_id(0), tl.program_id(1)
    heat = tl.load(temperature + row)
    if heat == 0:
        return
    is_finite, largest, holds = _row_of(row, maxima, num_rows, num_parts, PARTS, ADJUSTED)
    if not is_finite:
        return
    chunks = part * _CHUNKS + tl.arange(0, _CHUNKS)
    scaled = _scaled(
        row,
        chunks[:, None] * _CHUNK + tl.arange(0, _CHUNK)[None, :],
        largest,
        heat,
        holds,
        logits,
        logits_stride,
        vocab_size,
        state,
        slot,
        adjusted,
        flags,
        ADJUSTED,
    )
    is_kept = _key(scaled) >= _least_key(row, num_rows, least, least_keys)
    weights = tl.sum(tl.where(is_kept, _weights(scaled), 0), axis=1)
    numbers = _uniforms(
        tl.load(seed + row), tl.load(sequence_index + row), tl.load(position + row), chunks + _CHUNK
    )
    finished = _times(_exponentials(numbers), weights)
    first = tl.min(finished, axis=0)
    tl.store(times + row * num_parts + part, first)
    winner = tl.min(tl.where(finished == first, chunks, _NO_TOKEN), axis=0)
    tl.store(winners + row * num_parts + part, winner)


@triton.jit(do_not_specialize=["num_rows"])
def _finish(
    logits,
    logits_stride,
    vocab_size,
    num_rows,
    num_parts,
    state,
    slot,
    adjusted,
    flags,
    maxima,
    temperature,
    least,
    top_k,
    top_p,
    least_keys,
    seed,
    sequence_index,
    position,
    times,
    winners,
    spots,
    tokens,
    PARTS: tl.constexpr,
    ADJUSTED: tl.constexpr,
):
    """Stores the row's token; -1: its logits are not finite."""
    row, parts = tl.program_id(0), tl.arange(0, PARTS)
    is_finite, largest, holds = _row_of(row, maxima, num_rows, num_parts, PARTS, ADJUSTED)
    if not is_finite:
        tl.store(tokens + row, -1)
        return
    inside = parts < num_parts
    places = row * num_parts + parts
    heat = tl.load(temperature + row)
    if heat == 0:
        which = tl.where(holds, 0, 1) * num_rows * num_parts
        top = tl.load(maxima + num_rows * num_parts + which + places, inside, other=-_INFINITY)
        spot = tl.load(spots + which + places, inside, other=_NO_TOKEN)
        token = tl.min(tl.where(top == largest, spot, _NO_TOKEN), axis=0)
        tl.store(tokens + row, token.to(tl.int64))
        return
    finished = tl.load(times + places, inside, other=_INFINITY)
    first = tl.min(finished, axis=0)
    chunk = tl.load(winners + places, inside, other=_NO_TOKEN)
    chunk = tl.min(tl.where(finished == first, chunk, _NO_TOKEN), axis=0)
    within = tl.arange(0, _CHUNK)
    scaled = _scaled(
        row,
        chunk * _CHUNK + within,
        largest,
        heat,
        holds,
        logits,
        logits_stride,
        vocab_size,
        state,
        slot,
        adjusted,
        flags,
        ADJUSTED,
    )
    is_kept = _key(scaled) >= _least_key(row, num_rows, least, least_keys)
    numbers = _uniforms(
        tl.load(seed + row), tl.load(sequence_index + row), tl.load(position + row), within
    )
    finished = _times(_exponentials(numbers), tl.where(is_kept, _weights(scaled), 0))
    won = tl.min(tl.where(finished == tl.min(finished, axis=0), within, _CHUNK), axis=0)
    tl.store(tokens + row, (chunk * _CHUNK + won).to(tl.int64))
