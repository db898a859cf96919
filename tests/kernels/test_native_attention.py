"""The native attention of every instruction set that this CPU has: against fp64 within the error
that its roundings allow, and bitwise against itself in other batches, chunks and threads."""

import dataclasses
import itertools
from functools import cache

import pytest
import torch
from torch import Tensor

import kvops
from bench.gpu import paged
from bench.gpu.paged import Geometry, PagedBatch, corrupt, paged_batch
from kvops import Backend
from kvops.native import NativeCpu

FP32, BF16 = torch.float32, torch.bfloat16
KINDS = pytest.mark.parametrize(
    ("dtype", "in_int8"),
    [(FP32, False), (BF16, False), (FP32, True), (BF16, True)],
    ids=["fp32", "bf16", "fp32 and int8", "bf16 and int8"],
)
NAN = float("nan")

GEOMETRIES = [
    Geometry(block_size=1, num_heads=4, num_kv_heads=4, head_dim=64),
    Geometry(block_size=7, num_heads=3, num_kv_heads=1, head_dim=96),
    Geometry(block_size=16, num_heads=4, num_kv_heads=2, head_dim=128),
    Geometry(block_size=64, num_heads=7, num_kv_heads=1, head_dim=20),
    Geometry(block_size=256, num_heads=8, num_kv_heads=1, head_dim=2),
    Geometry(block_size=96, num_heads=2, num_kv_heads=2, head_dim=256),
]
# New tokens and context: ends of tiles of 64 or 256 positions and of blocks, before, at and behind.
ROWS = [(1, 1), (1, 64), (1, 65), (40, 40), (0, 20), (130, 200), (5, 90), (1, 300), (70, 560)]
# Within a tile, over the end of one, one whole, more than any context.
WINDOWS = [1, 5, 64, 100, 1000]
MASKS = [*((window, 0.0) for window in WINDOWS), (None, 0.4), (None, 0.0), (100, 20.0)]
FULL = pytest.mark.full


def attend(
    cpu: NativeCpu,
    batch: PagedBatch,
    window: int | None = None,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """The output, written into the middle of a buffer of NaN: an element that is missing, or
    written beside the output, shows."""
    num_tokens, num_heads, head_dim = batch.q.shape
    poisoned = torch.full((num_tokens, num_heads + 2, head_dim), NAN, dtype=batch.q.dtype)
    out = poisoned[:, 1:-1]
    cpu.ops.attention(
        batch.q,
        batch.kv_layer,
        batch.block_tables,
        batch.cu_query_lens,
        batch.context_lens,
        head_dim**-0.5,
        window or 0,
        out,
        cap,
        sinks,
    )
    assert poisoned[:, [0, -1]].isnan().all()
    return out


@cache
def batch_of_rows(geometry: Geometry, window: int | None) -> PagedBatch:
    """A batch of ROWS, which all instruction sets share."""
    return paged_batch(geometry, ROWS, seed=1, window=window)


@cache
def rows_in_fp64(geometry: Geometry, window: int | None, cap: float) -> tuple[Tensor, Tensor]:
    return in_fp64(batch_of_rows(geometry, window), window, cap)


def in_fp64(
    batch: PagedBatch, window: int | None, cap: float = 0.0, sinks: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The outputs, and the weighted sum of the values' magnitudes, in fp64."""
    outputs: list[Tensor] = []
    magnitudes: list[Tensor] = []
    for row, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        begin, end = batch.cu_query_lens[row : row + 2].tolist()
        num_heads, head_dim = batch.q.shape[1:]
        grouped = (end - begin, keys.shape[1], num_heads // keys.shape[1], head_dim)
        q = batch.q[begin:end].double().reshape(grouped)
        scores = torch.einsum("ikgd,jkd->kgij", q, keys.double()) * head_dim**-0.5
        if cap:
            scores = cap * torch.tanh(scores / cap)
        last = torch.arange(len(keys) - len(q), len(keys))[:, None]
        position = torch.arange(len(keys))
        hidden = position > last
        if window is not None:
            hidden |= position <= last - window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.double().view(keys.shape[1], -1, 1, 1).expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, sink], dim=-1)
        weights = scores.softmax(dim=-1)[..., : len(keys)]
        for results, x in ((outputs, values), (magnitudes, values.abs())):
            results.append(torch.einsum("kgij,jkd->ikgd", weights, x.double()).flatten(1, 2))
    return torch.cat(outputs), torch.cat(magnitudes)


@pytest.mark.parametrize(
    ("geometry", "window", "cap"),
    [
        # `make test` has all geometries with two of the masks, and all masks with two of them.
        pytest.param(geometry, *mask, marks=[] if i in (2, 3) or mask in MASKS[-2:] else FULL)
        for i, geometry in enumerate(GEOMETRIES)
        for mask in MASKS
    ],
    ids=str,
)
@KINDS
def test_attention_is_as_near_as_its_roundings_allow(
    cpu: NativeCpu,
    geometry: Geometry,
    dtype: torch.dtype,
    in_int8: bool,
    window: int | None,
    cap: float,
) -> None:
    """bf16 rounds the probabilities before the weighted sum of values and before their own sum
    (each by at most 2^-8 of itself, in numerator and denominator), and the result; all else is
    fp32. A soft cap bounds scores by tanh."""
    geometry = dataclasses.replace(geometry, dtype=dtype, in_int8=in_int8)
    batch = batch_of_rows(geometry, window)
    expected, magnitude = rows_in_fp64(geometry, window, cap)
    error = (attend(cpu, batch, window, cap).double() - expected).abs()
    roundings = 2 * 2**-8 * magnitude + 2**-8 * expected.abs() if dtype == BF16 else 0.0
    assert (error <= roundings + (2e-6 + 1e-6 * cap) * magnitude).all()


@pytest.mark.parametrize("level", [-4.0, 3.0, 60.0, 1000.0])
@KINDS
@pytest.mark.parametrize("geometry", GEOMETRIES[:2], ids=str)
def test_a_sink_takes_its_share(
    cpu: NativeCpu, geometry: Geometry, dtype: torch.dtype, in_int8: bool, level: float
) -> None:
    """A sink far below all scores, near them, and far above, where it leaves nothing for the
    values. The reference uses the same sink."""
    batch = batch_of_rows(dataclasses.replace(geometry, dtype=dtype, in_int8=in_int8), 70)
    sinks = level + torch.linspace(-1, 1, batch.q.shape[1])
    expected, magnitude = in_fp64(batch, 70, sinks=sinks)
    actual = attend(cpu, batch, 70, sinks=sinks)
    roundings = 2 * 2**-8 * magnitude + 2**-8 * expected.abs() if dtype == BF16 else 0.0
    # The power of a large number has the rounding of that number.
    error = (actual.double() - expected).abs()
    assert (error <= roundings + (3e-6 + 2e-7 * abs(level)) * magnitude + 1e-30).all()
    if level == 1000:
        assert not actual.any()
    without = attend(cpu, batch, 70)
    assert torch.equal(attend(cpu, batch, 70, sinks=sinks - 2000), without)


@KINDS
def test_native_attention_equals_the_reference(
    cpu: NativeCpu, reference: Backend, dtype: torch.dtype, in_int8: bool
) -> None:
    """The whole interface: block tables, slots, windows and sinks have the same meaning."""
    batch = paged_batch(
        dataclasses.replace(GEOMETRIES[1], dtype=dtype, in_int8=in_int8), ROWS, seed=2, window=70
    )
    sinks = torch.linspace(-2, 2, batch.q.shape[1])
    expected = paged.attend(reference, batch, 70, sinks=sinks)
    tolerance = 2e-6 if dtype == FP32 else 1.6e-2
    actual = attend(cpu, batch, 70, sinks=sinks)
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def chunk(batch: PagedBatch, begin: int, end: int) -> PagedBatch:
    """Tokens [begin, end) of a batch with one prompt, as a row."""
    return dataclasses.replace(
        batch,
        q=batch.q[begin:end],
        cu_query_lens=torch.tensor([0, end - begin], dtype=torch.int32),
        context_lens=torch.tensor([end], dtype=torch.int32),
    )


@KINDS
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size", "window"),
    [
        (2, 2, 32, 16, None),
        (6, 3, 96, 32, 50),
        (9, 3, 128, 16, 50),
        (4, 1, 96, 16, None),
        (5, 1, 64, 16, None),
        (12, 2, 32, 16, 50),
        (8, 1, 64, 48, None),
        (7, 1, 32, 16, 50),
    ],
)
def test_a_query_s_bits_do_not_depend_on_how_the_prompt_is_cut(
    cpu: NativeCpu,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    dtype: torch.dtype,
    in_int8: bool,
) -> None:
    """Chunks of one token are decode steps."""
    geometry = Geometry(block_size, num_heads, num_kv_heads, head_dim, dtype, in_int8)
    batch = paged_batch(geometry, [(270, 270)], seed=3)
    whole = attend(cpu, batch, window)
    for size in (1, 7, 64, 100):
        chunks = [
            attend(cpu, chunk(batch, begin, min(270, begin + size)), window)
            for begin in range(0, 270, size)
        ]
        assert torch.equal(torch.cat(chunks), whole)


@KINDS
def test_later_positions_do_not_matter_even_if_nan(
    cpu: NativeCpu, dtype: torch.dtype, in_int8: bool
) -> None:
    """Keys and values from position 101 on are NaN, and other queries of the same call read
    them."""
    batch = paged_batch(Geometry(16, 4, 2, 32, dtype, in_int8), [(200, 200)], seed=4)
    whole = attend(cpu, batch)
    for position in range(101, 200):
        block = batch.block_tables[0, position // 16]
        corrupt(batch, block, position % 16)
    corrupted = attend(cpu, batch)
    assert torch.equal(corrupted[:101], whole[:101])
    assert corrupted[101:].isnan().all()
    assert torch.equal(attend(cpu, chunk(batch, 100, 101)), whole[100:101])  # a decode


@KINDS
def test_positions_before_the_window_do_not_matter_even_if_nan(
    cpu: NativeCpu, dtype: torch.dtype, in_int8: bool
) -> None:
    """Position 70 is NaN: through a window of 25, queries 70 to 94 read it, and no others."""
    batch = paged_batch(Geometry(16, 4, 2, 32, dtype, in_int8), [(200, 200)], seed=5)
    whole = attend(cpu, batch, 25)
    corrupt(batch, batch.block_tables[0, 70 // 16], 70 % 16)
    corrupted = attend(cpu, batch, 25)
    assert torch.equal(corrupted[:70], whole[:70])
    assert corrupted[70:95].isnan().all()
    assert torch.equal(corrupted[95:], whole[95:])
    assert torch.equal(attend(cpu, chunk(batch, 95, 96), 25), whole[95:96])  # a decode


@pytest.mark.parametrize("corrupted", ["key", "value", "query"])
@pytest.mark.parametrize("poison", [NAN, float("inf"), float("-inf")])
def test_non_finite_values_stay_visible(cpu: NativeCpu, corrupted: str, poison: float) -> None:
    batch = paged_batch(Geometry(16, 1, 1, 32), [(1, 100)], seed=6)
    if corrupted == "query":
        batch.q[0, 0, 3] = poison
    else:
        batch.kv_layer[batch.block_tables[0, 2], int(corrupted == "value"), 1, 0, 3] = poison
    finite = attend(cpu, batch).isfinite()
    if corrupted == "key":
        # An infinite score is a weight of 1 or 0 in the limit: NaN, or that position left out.
        score = batch.q[0, 0, 3].item() * poison
        assert finite.all() == (score == float("-inf"))
    else:
        assert not finite[0, 0, 3]


def test_scores_that_overflow_a_softmax_without_a_maximum(cpu: NativeCpu) -> None:
    batch = paged_batch(GEOMETRIES[2], [(3, 150)], seed=7)
    batch.q.mul_(1000.0)
    expected, magnitude = in_fp64(batch, None)
    assert ((attend(cpu, batch).double() - expected).abs() <= 2e-3 * magnitude).all()


@KINDS
def test_a_row_s_bits_depend_neither_on_other_rows_nor_on_threads(
    cpu: NativeCpu, dtype: torch.dtype, in_int8: bool
) -> None:
    batch = paged_batch(
        dataclasses.replace(GEOMETRIES[2], dtype=dtype, in_int8=in_int8), ROWS, seed=8
    )
    together = attend(cpu, batch)
    assert torch.equal(attend(NativeCpu(2, cpu.isa), batch), together)
    for row, (begin, end) in enumerate(itertools.pairwise(batch.cu_query_lens.tolist())):
        assert torch.equal(attend(cpu, batch.row(row)), together[begin:end])


# What a row's context has in common with that of another row, which is named by its index: in whole
# tiles of 64 or 256, less than one, all but the query's own position, and everything.
SHARING = {
    "all alike": ([(200, 0, 0), (200, 0, 192), (257, 0, 192), (194, 0, 192)], None),
    "two families": (
        [(300, 0, 0), (500, 1, 0), (310, 0, 256), (500, 1, 448), (320, 0, 288), (460, 1, 448)],
        None,
    ),
    "a family in a family": (
        [(400, 0, 0), (400, 0, 64), (400, 0, 384), (390, 1, 320), (90, 0, 80), (64, 0, 64)],
        None,
    ),
    "less and less": ([(400, 0, 0), (400, 0, 384), (400, 0, 320), (400, 0, 256)], None),
    "too little": ([(100, 0, 0), (100, 0, 48), (63, 0, 48), (1, 1, 0)], None),
    "the same": ([(128, 0, 0), (128, 0, 128), (130, 0, 128)], None),
    "more than one call keeps": ([(80, 0, 0)] + [(80, 0, 64)] * 100, None),
    "behind a window": ([(200, 0, 0), (200, 0, 192), (210, 0, 192)], 70),
    "within a window": ([(200, 0, 0), (200, 0, 192), (210, 0, 192)], 210),
}


@cache
def sharing_batch(geometry: Geometry, sharing: str) -> PagedBatch:
    """Rows with one query each, as (context, the row that it shares blocks with, number of shared
    positions). All instruction sets share the batch."""
    rows, _ = SHARING[sharing]
    batch = paged_batch(geometry, [(1, context) for context, _, _ in rows], seed=9)
    for row, (_, other, shared) in enumerate(rows):
        num_blocks = shared // geometry.block_size
        batch.block_tables[row, :num_blocks] = batch.block_tables[other, :num_blocks]
    return batch


@pytest.mark.parametrize("sharing", SHARING)
@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(16, 16, 8, 128, BF16),
        Geometry(32, 8, 1, 64, BF16),
        Geometry(16, 3, 3, 32, BF16),
        Geometry(16, 6, 2, 96, BF16),
        Geometry(16, 4, 2, 128, FP32),
        Geometry(16, 16, 8, 128, BF16, in_int8=True),
        Geometry(16, 6, 2, 96, BF16, in_int8=True),
    ],
    ids=str,
)
def test_a_row_s_bits_do_not_depend_on_who_shares_its_blocks(
    cpu: NativeCpu, geometry: Geometry, sharing: str
) -> None:
    """Shared blocks are read once for all rows that share them. The rows of one family are not
    adjacent in the call."""
    rows, window = SHARING[sharing]
    batch = sharing_batch(geometry, sharing)
    together = attend(cpu, batch, window)
    assert torch.equal(attend(NativeCpu(2, cpu.isa), batch, window), together)
    for row in {*range(min(len(rows), 6)), len(rows) // 2, len(rows) - 1}:
        assert torch.equal(attend(cpu, batch.row(row), window), together[row : row + 1])


def test_non_finite_values_behind_shared_blocks_stay_in_their_row(cpu: NativeCpu) -> None:
    batch = paged_batch(Geometry(16, 4, 2, 32, BF16), [(1, 100)] * 3, seed=9)
    batch.block_tables[1:, :6] = batch.block_tables[0, :6]
    whole = attend(cpu, batch)
    corrupt(batch, batch.block_tables[1, 6], 2)
    corrupted = attend(cpu, batch)
    assert corrupted[1].isnan().all()
    assert torch.equal(corrupted[[0, 2]], whole[[0, 2]])


@pytest.mark.parametrize(
    ("num_heads", "head_dim", "problem"),
    [
        (2, 7, "odd size or of more than 256"),
        (2, 258, "odd size or of more than 256"),
        (513, 8, "more query heads of a KV head"),
    ],
)
def test_heads_that_the_kernels_cannot_do_are_refused(
    num_heads: int, head_dim: int, problem: str
) -> None:
    geometry = Geometry(block_size=4, num_heads=num_heads, num_kv_heads=1, head_dim=head_dim)
    batch = paged_batch(geometry, [(3, 5)], seed=0)
    with pytest.raises(ValueError, match=problem):
        paged.attend(kvops.backend("cpu"), batch)
