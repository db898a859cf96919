"""The calls of flash-attn: layouts, lengths, masks, and refusals.

flash-attn needs a GPU: a stand-in with its signatures takes its place. So the calls are tested, but
not the speed. `bench/gpu_check.sh` calls the package itself.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

import kvops
from bench.gpu.paged import Geometry, PagedBatch, attend, paged_batch
from kvops import AttentionShape, Backend, BackendUnavailable

from . import flash_stand_in
from .test_attention import ROWS, TOLERANCE

BF16 = torch.bfloat16
GEOMETRIES = [
    Geometry(block_size=256, num_heads=4, num_kv_heads=2, head_dim=64, dtype=BF16),
    Geometry(block_size=512, num_heads=3, num_kv_heads=1, head_dim=128, dtype=BF16),
    Geometry(block_size=256, num_heads=2, num_kv_heads=2, head_dim=32, dtype=torch.float16),
]
SEVERAL_BLOCKS = [(1, 256), (300, 600), (1, 257), (20, 513)]
LONG_DECODE = [(1, 600), (1, 512), (1, 1)]
BATCHES = {**ROWS, "several blocks": SEVERAL_BLOCKS, "long decode": LONG_DECODE}


@pytest.fixture(scope="module")
def flash() -> Iterator[Backend]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "flash_attn", flash_stand_in)
        patch.delitem(sys.modules, "kvops.attention.flash_package", raising=False)
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        patch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H100")
        yield kvops.backend("flash")
        sys.modules.pop("kvops.attention.flash_package")


def shape_of(geometry: Geometry, *windows: int) -> AttentionShape:
    return AttentionShape(
        geometry.num_heads,
        geometry.num_kv_heads,
        geometry.head_dim,
        geometry.block_size,
        geometry.dtype,
        geometry.kv_dtype,
        windows or (None,),
    )


def finite(batch: PagedBatch) -> PagedBatch:
    """Values without NaN: flash-attn multiplies values outside of a window by zero."""
    batch.kv_layer.nan_to_num_(1000.0)
    return batch


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES.keys())
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_flash_attention_equals_the_reference(
    flash: Backend, reference: Backend, geometry: Geometry, rows: list[tuple[int, int]]
) -> None:
    """The arena has NaN behind the contexts."""
    batch = paged_batch(geometry, rows, seed=len(rows))
    rtol, atol = TOLERANCE[BF16]
    torch.testing.assert_close(attend(flash, batch), attend(reference, batch), rtol=rtol, atol=atol)


@pytest.mark.parametrize("window", [1, 40, 300, 1000])
@pytest.mark.parametrize("rows", [SEVERAL_BLOCKS, LONG_DECODE], ids=["prefill", "decode"])
def test_flash_attention_slides_the_window_as_the_reference(
    flash: Backend, reference: Backend, rows: list[tuple[int, int]], window: int
) -> None:
    batch = finite(paged_batch(GEOMETRIES[0], rows, seed=window, window=window))
    rtol, atol = TOLERANCE[BF16]
    torch.testing.assert_close(
        attend(flash, batch, window), attend(reference, batch, window), rtol=rtol, atol=atol
    )


@pytest.mark.parametrize("rows", [[(1, 300), (1, 17)], [(3, 300), (20, 20)]])
def test_flash_attention_caps_scores(
    flash: Backend, reference: Backend, rows: list[tuple[int, int]]
) -> None:
    batch = paged_batch(GEOMETRIES[0], rows, seed=3)
    rtol, atol = TOLERANCE[BF16]
    expected = attend(reference, batch, cap=0.3)
    torch.testing.assert_close(attend(flash, batch, cap=0.3), expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize(
    "rows", [[(2, 300), (0, 20), (1, 7)], [(1, 300), (1, 20), (1, 7)]], ids=["uneven", "one each"]
)
def test_as_many_tokens_as_rows_need_not_be_one_each(
    flash: Backend, reference: Backend, rows: list[tuple[int, int]]
) -> None:
    """Steps with one token in each row are decode steps, for which flash-attn has another function.
    Here such a step follows another one of the same shapes."""
    batch = paged_batch(GEOMETRIES[0], rows, seed=11)
    rtol, atol = TOLERANCE[BF16]
    for _ in range(2):
        torch.testing.assert_close(
            attend(flash, batch), attend(reference, batch), rtol=rtol, atol=atol
        )


@pytest.mark.parametrize(
    ("rows", "function", "longest"),
    [
        ([(1, 20)] * 300, "flash_attn_with_kvcache", None),
        ([(0, 20), (2, 20)], "flash_attn_varlen_func", 2),
        ([(1, 20), (40, 40), (3, 9)], "flash_attn_varlen_func", 40),
    ],
    ids=["decode", "as many tokens as rows", "prefill"],
)
def test_a_launch_has_no_more_programs_than_the_longest_row_needs(
    flash: Backend,
    monkeypatch: pytest.MonkeyPatch,
    rows: list[tuple[int, int]],
    function: str,
    longest: int | None,
) -> None:
    """The facts of an earlier step in the same tensors have no effect."""
    asked: list[tuple[str, int | None]] = []
    for name in ("flash_attn_with_kvcache", "flash_attn_varlen_func"):

        def record(*_: Any, _name: str = name, **arguments: Any) -> torch.Tensor:
            asked.append((_name, arguments.get("max_seqlen_q")))
            return torch.zeros(len(rows), 1, 4, 64)

        monkeypatch.setattr(f"kvops.attention.flash_package.{name}", record)
    batch = paged_batch(GEOMETRIES[0], [(1, 20)] * len(rows), seed=1)
    attend(flash, batch)
    batch.cu_query_lens.copy_(torch.tensor([0, *(new for new, _ in rows)]).cumsum(0))
    attend(flash, replace(batch, q=torch.zeros(int(batch.cu_query_lens[-1]), 4, 64, dtype=BF16)))
    assert asked == [("flash_attn_with_kvcache", None), (function, longest)]


def test_indices_may_be_int64_and_queries_a_strided_view(
    flash: Backend, reference: Backend
) -> None:
    batch = paged_batch(GEOMETRIES[0], SEVERAL_BLOCKS, seed=12)
    qkv = torch.full((len(batch.q), 8, 64), float("nan"), dtype=BF16)
    qkv[:, 2:6] = batch.q
    fields = ("block_tables", "cu_query_lens", "context_lens")
    strided = replace(batch, q=qkv[:, 2:6], **{f: getattr(batch, f).long() for f in fields})
    rtol, atol = TOLERANCE[BF16]
    torch.testing.assert_close(
        attend(flash, strided), attend(reference, batch), rtol=rtol, atol=atol
    )


@pytest.mark.parametrize(
    ("geometry", "message"),
    [
        (Geometry(16, 2, 2, 64, BF16), "multiple of 256, this pool has 16: choose --block-size"),
        (Geometry(256, 2, 2, 12, BF16), "no kernels for head size 12"),
        (Geometry(256, 2, 2, 264, BF16), "no kernels for head size 264"),
        (Geometry(256, 2, 2, 64), r"bf16 and fp16, not in torch\.float32"),
    ],
    ids=["block size", "odd head size", "large head size", "fp32"],
)
def test_an_arena_that_flash_attn_cannot_read_is_refused(
    flash: Backend, geometry: Geometry, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        attend(flash, paged_batch(geometry, [(1, 3)], seed=0))
    with pytest.raises(ValueError, match=message):
        flash.check_attention(shape_of(geometry))


def test_results_of_flash_name_the_package(flash: Backend) -> None:
    numerics = flash.numerics(BF16)
    assert (numerics["backend"], numerics["flash_attn"]) == ("flash", "2.8.3")
    assert {"triton", "cuda", "torch"} <= numerics.keys()


def test_flash_is_refused_without_a_gpu(flash: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(BackendUnavailable, match="'flash' needs a CUDA device"):
        kvops.backend("flash")
