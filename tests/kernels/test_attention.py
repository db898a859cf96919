"""paged_attention: the reference equals attention without pages, and every backend equals the
reference."""

from dataclasses import replace

import pytest
import torch

from bench.gpu.paged import Geometry, attend, paged_batch
from kvops import Backend

TOLERANCE = {torch.float32: (1e-5, 5e-6), torch.bfloat16: (1.6e-2, 8e-3)}

GEOMETRIES = [
    Geometry(block_size=16, num_heads=4, num_kv_heads=2, head_dim=16),
    Geometry(block_size=1, num_heads=4, num_kv_heads=4, head_dim=8),
    Geometry(block_size=256, num_heads=6, num_kv_heads=1, head_dim=32),
    Geometry(block_size=7, num_heads=16, num_kv_heads=8, head_dim=128),
    Geometry(block_size=16, num_heads=8, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16),
    Geometry(block_size=3, num_heads=3, num_kv_heads=3, head_dim=10, dtype=torch.bfloat16),
]
ROWS = {
    "one token": [(1, 1)],
    "decode": [(1, 1), (1, 16), (1, 17), (1, 300)],
    "prefill": [(1, 1), (15, 15), (16, 16), (33, 33)],
    "chunks": [(7, 8), (2, 300), (16, 64), (64, 65)],
    "mixed, with an empty row": [(1, 77), (40, 40), (0, 20), (5, 90), (1, 2)],
}


# Within a block, whole blocks, over the ends of blocks, above all contexts.
WINDOWS = [1, 5, 16, 40, 1000]


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_every_backend_attends_as_the_reference(
    ops: Backend, reference: Backend, geometry: Geometry, rows: list[tuple[int, int]]
) -> None:
    batch = paged_batch(geometry, rows, seed=len(rows))
    rtol, atol = TOLERANCE[geometry.dtype]
    torch.testing.assert_close(attend(ops, batch), attend(reference, batch), rtol=rtol, atol=atol)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_every_backend_slides_the_window_as_the_reference(
    ops: Backend, reference: Backend, geometry: Geometry, rows: list[tuple[int, int]], window: int
) -> None:
    batch = paged_batch(geometry, rows, seed=window, window=window)
    rtol, atol = TOLERANCE[geometry.dtype]
    torch.testing.assert_close(
        attend(ops, batch, window), attend(reference, batch, window), rtol=rtol, atol=atol
    )


@pytest.mark.parametrize(("cap", "window"), [(0.3, None), (30.0, 16)])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_every_backend_caps_scores_as_the_reference(
    ops: Backend,
    reference: Backend,
    geometry: Geometry,
    rows: list[tuple[int, int]],
    cap: float,
    window: int | None,
) -> None:
    """The smaller cap bounds most scores, the larger none."""
    batch = paged_batch(geometry, rows, seed=7, window=window)
    expected = attend(reference, batch, window, cap)
    rtol, atol = TOLERANCE[geometry.dtype]
    torch.testing.assert_close(attend(ops, batch, window, cap), expected, rtol=rtol, atol=atol)
    if cap < 1 and geometry.dtype == torch.float32 and rows != ROWS["one token"]:
        assert (expected - attend(reference, batch, window)).abs().max() > 0.01


@pytest.mark.parametrize("window", [None, *WINDOWS])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_the_reference_is_softmax_attention_over_the_contiguous_context(
    reference: Backend, rows: list[tuple[int, int]], window: int | None
) -> None:
    """In fp64, as a masked product of whole matrices: another formula than that of the
    reference."""
    geometry = Geometry(block_size=5, num_heads=6, num_kv_heads=2, head_dim=12)
    batch = paged_batch(geometry, rows, seed=1, window=window)
    out = attend(reference, batch, window)
    begin = 0
    for (new, context), keys, values in zip(rows, batch.keys, batch.values, strict=True):
        q = batch.q[begin : begin + new].double().view(new, 2, 3, 12)
        scores = torch.einsum("ikgd,jkd->kgij", q, keys.double()) * 12**-0.5
        hidden = torch.ones(new, context, dtype=torch.bool).triu(context - new + 1)
        if window is not None:
            hidden |= torch.ones(new, context, dtype=torch.bool).tril(context - new - window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
        expected = torch.einsum("kgij,jkd->ikgd", weights, values.double()).reshape(new, 6, 12)
        torch.testing.assert_close(
            out[begin : begin + new].double(), expected, rtol=1e-5, atol=1e-6
        )
        begin += new


def test_a_window_of_one_is_the_value_of_the_query_s_own_position(ops: Backend) -> None:
    batch = paged_batch(GEOMETRIES[0], [(4, 50), (1, 17)], seed=5, window=1)
    own = torch.cat([batch.values[0][-4:], batch.values[1][-1:]])
    torch.testing.assert_close(attend(ops, batch, 1), own.repeat_interleave(2, dim=1))


def test_queries_may_be_a_strided_view(ops: Backend) -> None:
    batch = paged_batch(GEOMETRIES[0], ROWS["mixed, with an empty row"], seed=4)
    qkv = torch.full((batch.q.shape[0], 8, 16), float("nan"))
    qkv[:, 2:6] = batch.q
    strided = replace(batch, q=qkv[:, 2:6])
    assert torch.equal(attend(ops, strided), attend(ops, batch))
