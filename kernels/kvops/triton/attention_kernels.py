"""The kernels of `kvops.triton.attention`, which describes them."""
# Triton has no type annotations, and a kernel's arguments have no Python types.
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

import triton
import triton.language as tl

from kvops.triton.float8 import loaded

NO_WINDOW = tl.constexpr(1 << 30)


@triton.jit
def _sink_weight(sink, largest):
    """The weight of a sink beside scores of which `largest` is the largest; at most 2^126, which
    leaves nothing of the attention."""
    base = tl.where(largest == float("-inf"), 0.0, largest)
    return tl.exp2(tl.minimum(sink * 1.4426950408889634 - base, 126.0))


@triton.jit
def _tile(
    tile,
    cu_query_lens,
    num_rows,
    DECODE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Return the tile's row, the index of the tile's first token in q, and the end of the row's
    tokens in q (exclusive).

    With DECODE, row r is tile r and token r. Otherwise, if a tile has several tokens, row r begins
    at tile cu_query_lens[r] // TOKENS + r: that gives each row enough tiles, and leaves some tiles
    empty.
    """
    if DECODE:
        return tile, tile, tile + 1
    rows = tl.arange(0, ROWS)
    begins = tl.load(cu_query_lens + rows, mask=rows < num_rows, other=0).to(tl.int32)
    first_tiles = begins if TOKENS == 1 else begins // TOKENS + rows
    row = tl.sum(((first_tiles <= tile) & (rows < num_rows)).to(tl.int32), axis=0) - 1
    begin = tl.load(cu_query_lens + row).to(tl.int32)
    end = tl.load(cu_query_lens + row + 1).to(tl.int32)
    first_tile = begin if TOKENS == 1 else begin // TOKENS + row
    return row, begin + (tile - first_tile) * TOKENS, end


@triton.jit
def _loaded(places, is_key, is_dim, MASKED: tl.constexpr, WHOLE: tl.constexpr):
    if MASKED:
        return tl.load(places, mask=is_key & is_dim, other=0.0)
    if WHOLE:
        return tl.load(places)
    return tl.load(places, mask=is_dim, other=0.0)


@triton.jit
def _round(
    begin,
    queries,
    pages,
    table,
    entry_stride,
    scale,
    cap,
    limits,
    largest,
    total,
    values,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Adds KEYS keys from `begin` on to the softmax of a tile; MASKED: some of its queries do not
    see some of them."""
    kv, block_stride, half_stride, slot_stride, dim_stride = pages
    positions, first_key, end_key, window = limits
    DIMS: tl.constexpr = queries.shape[1]
    keys, dims = begin + tl.arange(0, KEYS), tl.arange(0, DIMS)
    is_key, is_dim = (keys >= first_key) & (keys < end_key), dims < HEAD_DIM
    entries = table + keys // BLOCK_SIZE * entry_stride
    blocks = tl.load(entries, mask=is_key, other=0) if MASKED else tl.load(entries)
    places = kv + blocks.to(tl.int64) * block_stride + keys % BLOCK_SIZE * slot_stride
    k = _loaded(
        places[None, :] + dims[:, None] * dim_stride,
        is_key[None, :],
        is_dim[:, None],
        MASKED,
        HEAD_DIM == DIMS,
    )
    k = loaded(k, queries.dtype)
    scores = tl.dot(queries, k, input_precision="ieee")
    if CAPPED:  # tanh x = 1 - 2 / (e^2x + 1)
        scores = cap * (1.0 - 2.0 / (tl.exp2(scores * (scale * 2.885390081777927)) + 1.0))
        scale = 1.0
    if MASKED:
        ahead = keys[None, :] - positions[:, None]
        seen = is_key[None, :] & (ahead <= 0) & (ahead > -window)
        scores = tl.where(seen, scores, float("-inf"))
    raised = tl.maximum(largest, tl.max(scores, axis=1) * scale)
    base = raised
    if MASKED:  # a line may not have seen a key yet
        base = tl.where(raised == float("-inf"), 0.0, raised)
    weights = tl.exp2(scores * scale - base[:, None])
    kept = tl.exp2(largest - base)
    v = _loaded(
        places[:, None] + half_stride + dims[None, :] * dim_stride,
        is_key[:, None],
        is_dim[None, :],
        MASKED,
        HEAD_DIM == DIMS,
    )
    v = loaded(v, queries.dtype)
    total = total * kept + tl.sum(weights, axis=1)
    values = values * kept[:, None]
    values = tl.dot(weights.to(v.dtype), v, acc=values, input_precision="ieee")
    return raised, total, values


@triton.jit(
    do_not_specialize=["table_stride", "entry_stride", "num_rows", "window"],
    do_not_specialize_on_alignment=["tables", "cu_query_lens", "context_lens", "maxima", "sums"],
)
def attend(
    q,
    q_strides,
    kv,
    kv_strides,
    tables,
    table_stride,
    entry_stride,
    cu_query_lens,
    context_lens,
    out,
    maxima,
    sums,
    sinks,
    num_rows,
    scale,
    cap,
    window,
    HEAD_DIM: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    DECODE: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    LINES: tl.constexpr,
    KEYS: tl.constexpr,
    DIMS: tl.constexpr,
    SPLIT: tl.constexpr,
    CAPPED: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Computes one tile over its context, or over one split of it.

    Line i of a tile is token i // GROUP with head i % GROUP of the group. `scale` includes log2(e),
    because the exponentials are powers of two; if CAPPED, `cap` includes it. `out` is [T, H, D], or
    with SPLIT [T, H, splits, D]. For an empty split, only the maximum (-inf) is written.
    """
    kv_head, split = tl.program_id(1), tl.program_id(2)
    row, first_token, end_token = _tile(
        tl.program_id(0), cu_query_lens, num_rows, DECODE, ROWS, TOKENS
    )
    if first_token >= end_token:
        return

    context = tl.load(context_lens + row).to(tl.int32)
    lines, dims = tl.arange(0, LINES), tl.arange(0, DIMS)
    tokens = first_token + lines // GROUP
    heads = kv_head * GROUP + lines % GROUP
    q_token_stride, q_head_stride, q_dim_stride = q_strides
    block_stride, half_stride, slot_stride, head_stride, dim_stride = kv_strides
    is_line = (lines < TOKENS * GROUP) & (tokens < end_token)
    is_dim = dims < HEAD_DIM
    positions = context - end_token + tokens

    # The tile's first query sees the earliest positions, its last one the latest. Positions that no
    # query sees may have any content and are not read.
    first_position = context - end_token + first_token
    first_key = tl.maximum(first_position - window + 1, 0)
    end_key = tl.minimum(first_position + TOKENS, context)
    if SPLIT:
        split_size = tl.maximum(tl.cdiv(tl.cdiv(context, MAX_SPLITS), KEYS) * KEYS, MIN_SPLIT)
        first_key = tl.maximum(first_key, split * split_size)
        end_key = tl.minimum(end_key, (split + 1) * split_size)

    queries = tl.load(
        q
        + tokens[:, None].to(tl.int64) * q_token_stride
        + heads[:, None] * q_head_stride
        + dims[None, :] * q_dim_stride,
        mask=is_line[:, None] & is_dim[None, :],
        other=0.0,
    )
    table = tables + row.to(tl.int64) * table_stride
    largest = tl.full([LINES], float("-inf"), tl.float32)
    total = tl.zeros([LINES], tl.float32)
    values = tl.zeros([LINES, DIMS], tl.float32)
    begin_key = first_key // KEYS * KEYS
    masked_key = begin_key  # before it, every query sees all keys
    if window == NO_WINDOW:
        seen_by_all = tl.minimum(first_position + 1, end_key)
        masked_key = tl.maximum(begin_key, seen_by_all // KEYS * KEYS)
    pages = kv + kv_head * head_stride, block_stride, half_stride, slot_stride, dim_stride
    limits = positions, first_key, end_key, window
    for key in range(begin_key, masked_key, KEYS):
        largest, total, values = _round(
            key, queries, pages, table, entry_stride, scale, cap, limits, largest, total, values,
            BLOCK_SIZE, KEYS, HEAD_DIM, CAPPED, MASKED=False,
        )  # fmt: skip
    for key in range(masked_key, end_key, KEYS):
        largest, total, values = _round(
            key, queries, pages, table, entry_stride, scale, cap, limits, largest, total, values,
            BLOCK_SIZE, KEYS, HEAD_DIM, CAPPED, MASKED=True,
        )  # fmt: skip

    spots = tokens.to(tl.int64) * tl.num_programs(1) * GROUP + heads
    if SPLIT:
        spots = spots * tl.num_programs(2) + split
        tl.store(maxima + spots, largest, mask=is_line)
        if first_key >= end_key:
            return
        tl.store(sums + spots, total, mask=is_line)
    else:
        if sinks is not None:
            total += _sink_weight(tl.load(sinks + heads, mask=is_line, other=0.0), largest)
        # A line may have seen no key: it has no token, or its row has no context.
        values = values / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(
        out + spots[:, None] * HEAD_DIM + dims[None, :],
        values.to(out.dtype.element_ty),
        mask=is_line[:, None] & is_dim[None, :],
    )


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=["maxima", "sums"])
def combine(
    parts,
    maxima,
    sums,
    sinks,
    out,
    num_splits,
    HEAD_DIM: tl.constexpr,
    DIMS: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Combines the splits of one token and head, each weighted by exp2(its maximum - the largest
    maximum). The sum always has MAX_SPLITS terms, zeros included, so that its order is the same in
    every batch. Of a row without context the result is 0."""
    spot = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    splits, dims = tl.arange(0, MAX_SPLITS), tl.arange(0, DIMS)
    places = spot * num_splits + splits
    maximum = tl.load(maxima + places, mask=splits < num_splits, other=float("-inf"))
    is_there = maximum > float("-inf")
    largest = tl.max(maximum, axis=0)
    weights = tl.exp2(maximum - tl.where(largest > float("-inf"), largest, 0.0))
    total = tl.sum(weights * tl.load(sums + places, mask=is_there, other=0.0), axis=0)
    if sinks is not None:
        total += _sink_weight(tl.load(sinks + tl.program_id(1)), largest)
    values = tl.load(
        parts + places[:, None] * HEAD_DIM + dims[None, :],
        mask=is_there[:, None] & (dims < HEAD_DIM)[None, :],
        other=0.0,
    )
    value = tl.sum(weights[:, None] * values, axis=0) / tl.where(total > 0, total, 1.0)
    tl.store(out + spot * HEAD_DIM + dims, value.to(out.dtype.element_ty), mask=dims < HEAD_DIM)
