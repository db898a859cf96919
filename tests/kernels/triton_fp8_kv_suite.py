"""The tests of keys and values in fp8 in Triton's interpreter. pytest does not collect this file:
`test_triton.py` runs it."""

import pytest
import torch

from bench.gpu.attention import fp8_numbers
from bench.gpu.paged import Geometry, attend, paged_batch
from kvops import Backend, fp8
from kvops.step import HeadNorms

from .test_attention import TOLERANCE

FP8 = torch.float8_e4m3fn
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ROWS = {
    "splits": [(1, 255), (1, 257), (1, 513)],
    "mixed, with an empty row": [(1, 77), (40, 40), (0, 20), (5, 90)],
}


@DTYPES
def test_heads_are_stored_as_the_nearest_numbers(ops: Backend, dtype: torch.dtype) -> None:
    """Of all sizes, NaN and infinity; a token without a slot is not stored."""
    heads = fp8_numbers(20).to(dtype)
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(1))[: len(heads)]
    slots[5] = -1
    arena = torch.ones(5, 3, 2, 16, 4, 20).to(FP8)
    ops.store_kv(arena[:, 1], heads, heads.flip(1), slots)
    expected = torch.ones(80, 2, 4, 20).to(FP8)
    keep = slots >= 0
    expected[slots[keep], 0] = fp8.saturated(heads)[keep]
    expected[slots[keep], 1] = fp8.saturated(heads.flip(1))[keep]
    found = arena[:, 1].transpose(1, 2).flatten(0, 1).contiguous()
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert (arena[:, [0, 2]].float() == 1).all()


@DTYPES
@pytest.mark.parametrize("has_norms", [False, True])
def test_heads_are_turned_before_they_are_stored(
    ops: Backend, reference: Backend, dtype: torch.dtype, has_norms: bool
) -> None:
    draw = torch.Generator().manual_seed(2)
    heads = torch.randn(5, 9 + 3 + 3, 10, generator=draw).to(dtype)
    angles, slots = torch.randn(5, 3, generator=draw), torch.tensor([3, 40, 17, 5, -1])
    weights = [1 + torch.randn(10, generator=draw).to(dtype) for _ in range(2)]
    norms = HeadNorms(weights[0], weights[1], 1e-5) if has_norms else None
    arenas = [torch.ones(3, 2, 2, 16, 3, 10).to(FP8) for _ in range(2)]
    for backend, arena in zip((ops, reference), arenas, strict=True):
        q, k, v = torch.split(heads.clone(), [9, 3, 3], dim=1)
        rotation = angles.cos(), angles.sin()
        backend.store_heads(arena[:, 1], q, k, v, slots, norms, rotation)
    found, expected = (arena.float() for arena in arenas)
    steps = (found - expected).abs() / expected.abs().clamp(min=2**-6)
    assert steps.max() < 2**-2.9  # a last bit of another order of operations moves one step
    assert (steps > 0).float().mean() < 0.01


@DTYPES
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS.keys())
def test_attention_reads_keys_and_values_in_fp8(
    ops: Backend,
    reference: Backend,
    dtype: torch.dtype,
    rows: list[tuple[int, int]],
    window: int | None,
) -> None:
    geometry = Geometry(16, num_heads=4, num_kv_heads=2, head_dim=24, dtype=dtype, in_fp8=True)
    batch = paged_batch(geometry, rows, seed=len(rows), window=window)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(
        attend(ops, batch, window), attend(reference, batch, window), rtol=rtol, atol=atol
    )


def test_what_is_not_finite_reaches_its_row(ops: Backend) -> None:
    """So that the request fails instead of going on with another number."""
    geometry = Geometry(16, num_heads=2, num_kv_heads=1, head_dim=16, in_fp8=True)
    batch = paged_batch(geometry, [(1, 20), (1, 20)], seed=1)
    block = batch.block_tables[0, 0]
    batch.kv_layer[block, :, 3] = fp8.saturated(torch.full((1, 16), float("inf")))
    out = attend(ops, batch)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_blocks_in_fp8_are_copied(ops: Backend) -> None:
    arena = torch.randn(4, 2, 2, 16, 2, 8).to(FP8)
    before = arena.view(torch.uint8).clone()
    ops.copy_blocks(arena, torch.tensor([[1, 3], [3, 0]]))
    assert torch.equal(arena.view(torch.uint8), before[[3, 1, 2, 1]])
    other = torch.zeros_like(arena)
    ops.copy_blocks(other, torch.tensor([[2, 0], [3, 1]]), arena)
    assert torch.equal(other.view(torch.uint8)[:2], before[[2, 1]])
