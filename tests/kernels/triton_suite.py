"""The tests that Triton's kernels must pass, on the device that QUIRE_KERNEL_DEVICE names: `cuda`,
or `cpu` with Triton's interpreter. Not collected by itself: `test_triton.py` runs it on the CPU,
`bench/gpu_check.sh` on a GPU.
"""

import os
from collections.abc import Iterator
from typing import cast

import pytest
import torch

import kvops
from kvops import Backend

from .on_device import OnDevice
from .paged import Geometry, paged_batch
from .test_attention import (
    TOLERANCE,
    attend,
    test_a_window_of_one_is_the_value_of_the_query_s_own_position,
    test_every_backend_attends_as_the_reference,
    test_every_backend_slides_the_window_as_the_reference,
    test_queries_may_be_a_strided_view,
)
from .test_ops import (
    test_add_rms_norm_adds_in_place_and_norms_the_sum,
    test_copy_blocks_from_another_arena,
    test_copy_blocks_reads_every_source_before_it_writes,
    test_copying_no_blocks_changes_nothing,
    test_linear,
    test_rms_norm,
    test_rms_norm_of_zeros_is_zero,
    test_rope_turns_queries_and_keys_in_place,
    test_silu_mul_takes_halves_of_a_fused_tensor,
    test_store_kv_of_nothing_at_all,
    test_store_kv_writes_its_slots_and_nothing_else,
)
from .triton_interpreter import compute_bf16_as_a_gpu

__all__ = [
    "test_a_window_of_one_is_the_value_of_the_query_s_own_position",
    "test_add_rms_norm_adds_in_place_and_norms_the_sum",
    "test_copy_blocks_from_another_arena",
    "test_copy_blocks_reads_every_source_before_it_writes",
    "test_copying_no_blocks_changes_nothing",
    "test_every_backend_attends_as_the_reference",
    "test_every_backend_slides_the_window_as_the_reference",
    "test_linear",
    "test_queries_may_be_a_strided_view",
    "test_rms_norm",
    "test_rms_norm_of_zeros_is_zero",
    "test_rope_turns_queries_and_keys_in_place",
    "test_silu_mul_takes_halves_of_a_fused_tensor",
    "test_store_kv_of_nothing_at_all",
    "test_store_kv_writes_its_slots_and_nothing_else",
]

SMALL = Geometry(block_size=16, num_heads=2, num_kv_heads=1, head_dim=16)


@pytest.fixture(scope="session")
def ops() -> Iterator[Backend]:
    device = os.environ["QUIRE_KERNEL_DEVICE"]
    with pytest.MonkeyPatch.context() as patch:
        if device == "cpu":
            compute_bf16_as_a_gpu(patch)
        yield cast(Backend, OnDevice(kvops.backend("triton"), device))


# Over 256 positions a row has several splits, over 8,192 they grow instead of becoming more.
SPLIT_ROWS = {
    "ends of splits": [(1, 255), (1, 256), (1, 257), (1, 512), (1, 513)],
    "beside a short row": [(1, 9000), (1, 3)],
    "an empty row, two tokens in another": [(2, 700), (0, 20), (1, 300)],
}


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("rows", SPLIT_ROWS.values(), ids=SPLIT_ROWS.keys())
def test_splits_of_a_context_join_to_the_whole(
    ops: Backend, reference: Backend, rows: list[tuple[int, int]], window: int | None
) -> None:
    batch = paged_batch(SMALL, rows, seed=7, window=window)
    torch.testing.assert_close(
        attend(ops, batch, window), attend(reference, batch, window), rtol=1e-5, atol=5e-6
    )


def test_a_decoded_row_has_the_same_bits_in_every_batch(ops: Backend) -> None:
    """Alone it may have fewer splits than beside a longer row; they begin where they began."""
    rows = [(1, 1), (1, 200), (1, 300), (1, 2000)]
    batch = paged_batch(SMALL, rows, seed=8)
    together = attend(ops, batch)
    for row, (_, context) in enumerate(rows):
        alone = ops.paged_attention(
            batch.q[row : row + 1],
            batch.kv_layer,
            batch.block_tables[row : row + 1, : -(-context // SMALL.block_size)],
            torch.tensor([0, 1]),
            torch.tensor([context]),
            16**-0.5,
        )
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("num_heads", [20, 71])
@pytest.mark.parametrize("rows", [[(1, 40), (1, 9)], [(9, 40), (1, 9)]], ids=["decode", "prefill"])
def test_a_group_may_be_larger_than_a_tile(
    ops: Backend, reference: Backend, num_heads: int, rows: list[tuple[int, int]]
) -> None:
    geometry = Geometry(block_size=16, num_heads=num_heads, num_kv_heads=1, head_dim=24)
    batch = paged_batch(geometry, rows, seed=9)
    torch.testing.assert_close(attend(ops, batch), attend(reference, batch), rtol=1e-5, atol=5e-6)


def test_fp16(ops: Backend, reference: Backend) -> None:
    geometry = Geometry(
        block_size=16, num_heads=4, num_kv_heads=2, head_dim=32, dtype=torch.float16
    )
    batch = paged_batch(geometry, [(1, 20), (5, 33)], seed=10)
    rtol, atol = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(attend(ops, batch), attend(reference, batch), rtol=rtol, atol=atol)
