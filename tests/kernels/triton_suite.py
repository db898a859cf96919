"""The tests that Triton's kernels must pass in Triton's interpreter, beside those of every backend.
pytest does not collect this file: `test_triton.py` runs it. (`bench/gpu_check.sh` is for a GPU.)"""

import dataclasses
import sys

import pytest
import torch

from bench.gpu.experts import in_dtype, randn, weights_of
from bench.gpu.linears import packed
from bench.gpu.paged import Geometry, attend, paged_batch
from kvops import Backend, fp8
from kvops.experts import ExpertWeights
from kvops.grouped import pack
from kvops.quantized import Kind
from kvops.triton import attention, linears
from kvops.triton.expert_tiles import ROWS, Row, Shape, Tiles, tiles_for
from kvops.triton.experts import experts

from . import flash_stand_in
from .test_attention import TOLERANCE

SMALL = Geometry(block_size=16, num_heads=2, num_kv_heads=1, head_dim=16)


@pytest.fixture
def flash(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """flash-attn as on newer GPUs, with Triton's kernels for all other operations."""
    monkeypatch.setitem(sys.modules, "flash_attn", flash_stand_in)
    monkeypatch.setattr(flash_stand_in, "reads_whole_pages", True)
    from kvops.attention.flash_package import FlashPackageKernels

    return Backend(FlashPackageKernels())


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
    """Alone, a row may have fewer splits than beside a longer row; the splits begin at the same
    positions."""
    rows = [(1, 1), (1, 200), (1, 300), (1, 2000)]
    batch = paged_batch(SMALL, rows, seed=8)
    together = attend(ops, batch)
    for row in range(len(rows)):
        assert torch.equal(attend(ops, batch.row(row))[0], together[row])


@pytest.mark.parametrize("longest", [20, 700], ids=["whole", "splits"])
@pytest.mark.parametrize("new", [1, 3], ids=["decode", "prefill"])
def test_a_row_without_context_is_0(
    ops: Backend, reference: Backend, longest: int, new: int
) -> None:
    """Padded rows of CUDA graphs: the blocks that they name may hold NaN."""
    batch = paged_batch(SMALL, [(new, new), (new, longest), (new, new)], seed=6)
    batch.context_lens[0] = batch.context_lens[2] = 0
    batch.block_tables[0] = batch.block_tables[2] = 0
    out = attend(ops, batch)
    assert not out[:new].any()
    assert not out[2 * new :].any()
    torch.testing.assert_close(out, attend(reference, batch), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("level", [-90.0, 0.0, 90.0])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("longest", [70, 700], ids=["whole", "splits"])
@pytest.mark.parametrize("new", [1, 3], ids=["decode", "prefill"])
def test_sinks_join_the_softmax(
    ops: Backend, reference: Backend, new: int, longest: int, window: int | None, level: float
) -> None:
    """Far below the scores, beside them, and so far above that nothing is left of the values. A row
    without context has a sink only."""
    geometry = Geometry(block_size=16, num_heads=4, num_kv_heads=2, head_dim=16)
    batch = paged_batch(geometry, [(new, longest), (new, 40), (new, new)], seed=3, window=window)
    batch.context_lens[2] = 0

    sinks = level + torch.linspace(-2, 2, 4)
    found, expected = (attend(backend, batch, window, sinks=sinks) for backend in (ops, reference))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=5e-6)


# Experts. A tile has 64 lines and 64 outputs, and reads 128 bytes of each line at once.

EXPERTS: dict[str, tuple[int, ExpertWeights]] = {
    "one row": (1, weights_of(8, 2)),
    "all experts of few": (37, weights_of(8, 8, normalizes=False)),
    "most experts without rows": (5, weights_of(130, 2)),
    "an expert of several tiles": (150, weights_of(3, 1)),
    "gpt-oss": (37, weights_of(8, 3, swiglu=True)),
    "several programs": (9, weights_of(4, 2, hidden=136, wide=200)),
}


@pytest.mark.parametrize("kind", ["int4-32", "int8", "fp8-128", "mxfp4"])
@pytest.mark.parametrize("name", ["an expert of several tiles", "gpt-oss", "several programs"])
def test_experts_of_quantized_weights(
    ops: Backend, reference: Backend, name: str, kind: Kind
) -> None:
    num_rows, plain = EXPERTS[name]
    hidden, (num, width) = plain.router.shape[1], (len(plain.router), plain.width)
    weights = dataclasses.replace(
        plain,
        gate_up=packed(kind, num * 2 * width, hidden),
        down=packed(kind, num * hidden, width),
    )
    x = randn(num_rows, hidden)
    rtol, atol = TOLERANCE[torch.float32]
    torch.testing.assert_close(
        ops.experts(x, weights), reference.experts(x, weights), rtol=4 * rtol, atol=8 * atol
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "weights"), EXPERTS.values(), ids=EXPERTS.keys())
def test_experts_compute_their_rows(
    ops: Backend,
    reference: Backend,
    num_rows: int,
    weights: ExpertWeights,
    dtype: torch.dtype,
) -> None:
    weights = in_dtype(weights, dtype)
    x = randn(num_rows, weights.router.shape[1]).to(dtype)
    rtol, atol = TOLERANCE[dtype]
    torch.testing.assert_close(
        ops.experts(x, weights), reference.experts(x, weights), rtol=2 * rtol, atol=2 * atol
    )


@pytest.mark.parametrize("tiles", [Tiles(16, 32, 64), Tiles(32, 128), Tiles(128, 16, 256)])
@pytest.mark.parametrize("name", ["an expert of several tiles", "gpt-oss", "several programs"])
def test_experts_compute_their_rows_in_other_tiles(
    reference: Backend, name: str, tiles: Tiles
) -> None:
    num_rows, weights = EXPERTS[name]
    x = randn(num_rows, weights.router.shape[1])
    routing = weights.choose(reference.linear(x, weights.router, weights.router_bias))
    rtol, atol = TOLERANCE[torch.float32]
    torch.testing.assert_close(
        experts(x, weights, *routing, tiles),
        reference.experts(x, weights),
        rtol=2 * rtol,
        atol=2 * atol,
    )


def test_a_row_of_the_table_of_tiles_is_for_its_gpu_and_shape() -> None:
    mine, wide = Shape(8, 64, 40, "bfloat16"), Tiles(32, 128)
    rows = [Row("A", mine, Tiles(16), "so"), Row("B", mine, wide, "so")]
    assert tiles_for("B", mine, rows) == wide
    others = (("B", dataclasses.replace(mine, width=48)), ("C", mine))
    assert [tiles_for(gpu, shape, rows) for gpu, shape in others] == [Tiles(), Tiles()]
    assert len({(row.gpu, row.shape) for row in ROWS}) == len(ROWS)


def test_experts_give_a_row_the_same_bits_in_every_batch(ops: Backend) -> None:
    """The router's choices are given, since its linear is PyTorch's."""
    weights, x = weights_of(4, 2), randn(150, 64)
    chosen, shares = weights.choose(x @ weights.router.T)
    together = experts(x, weights, chosen, shares)
    for row in (0, 7, 149):
        part = slice(row, row + 1)
        assert torch.equal(experts(x[part], weights, chosen[part], shares[part]), together[part])


# Quantized linears. A tile has 64 outputs, and a program at least four chunks of 128 inputs.

KINDS: tuple[Kind, ...] = (
    *("int4-32", "int4-64", "int4-128", "int8", "int8-16", "fp8-128", "mxfp4"),
)
LINEARS = {
    "one row, padded inputs": (1, 70, 200),
    "sums of splits": (3, 64, 1100),
    "two tiles of rows": (70, 130, 160),
    "unpacked for a prompt": (linears.BOUNDS[-1] + 1, 70, 200),
    "no rows": (0, 64, 128),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_rows", "n", "k"), LINEARS.values(), ids=LINEARS.keys())
@pytest.mark.parametrize("kind", KINDS)
def test_quantized_linears(
    ops: Backend,
    reference: Backend,
    kind: Kind,
    num_rows: int,
    n: int,
    k: int,
    dtype: torch.dtype,
) -> None:
    weight = packed(kind, n, k)
    x, bias = randn(num_rows, k).to(dtype), randn(n).to(dtype)
    rtol, atol = TOLERANCE[dtype]
    for one in (bias, None):
        found, expected = ops.linear(x, weight, one), reference.linear(x, weight, one)
        torch.testing.assert_close(found, expected, rtol=2 * rtol, atol=2 * atol)


def test_tensors_of_quantized_weights_fit_together(ops: Backend) -> None:
    weight = pack("int4-32", [randn(64, 128)])
    with pytest.raises(ValueError, match=r"scales: torch.int32 \[3, 64\]"):
        dataclasses.replace(weight, scales=weight.scales[:3])
    with pytest.raises(ValueError, match="x: float32"):
        ops.linear(randn(2, 96), weight)


def test_quantized_linears_give_a_row_the_same_bits_beside_any_others(ops: Backend) -> None:
    """Up to 16 rows, 64 and 256."""
    weight, x = pack("int4-32", [randn(64, 2500)]), randn(100, 2500)
    for low, high in ((1, 16), (17, 64), (65, 100)):
        assert torch.equal(ops.linear(x[:low], weight), ops.linear(x[:high], weight)[:low])


@pytest.mark.parametrize("num_rows", [16, 17, 300])
@pytest.mark.parametrize(("kind", "group"), [("fp8", 0), ("fp8-128", 128)])
def test_more_than_16_rows_are_multiplied_in_fp8(
    ops: Backend,
    reference: Backend,
    monkeypatch: pytest.MonkeyPatch,
    num_rows: int,
    kind: Kind,
    group: int,
) -> None:
    """Each row gets a scale as the weights of an output have, or one for each group. A row of zeros
    stays zero, and a row that is not finite is the only one."""
    monkeypatch.setattr(linears, "has_fp8", lambda device: True)
    weight, x = packed(kind, 192, 1152), randn(num_rows, 1152).bfloat16()
    bias = randn(192).bfloat16()
    x[3], x[5, 7] = 0, float("nan")
    found = ops.linear(x, weight, bias)
    if num_rows > 16:
        x = fp8.rounded(x, group)
    expected = reference.linear(x, weight, bias.to(x.dtype))
    rtol, atol = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(
        found.float(), expected.float(), rtol=2 * rtol, atol=4 * atol, equal_nan=True
    )
    assert found.isnan().any(1).nonzero().flatten().tolist() == [5]


@pytest.mark.parametrize("num_heads", [20, 71])
@pytest.mark.parametrize("rows", [[(1, 40), (1, 9)], [(9, 40), (1, 9)]], ids=["decode", "prefill"])
def test_a_group_may_be_larger_than_a_tile(
    ops: Backend, reference: Backend, num_heads: int, rows: list[tuple[int, int]]
) -> None:
    geometry = Geometry(block_size=16, num_heads=num_heads, num_kv_heads=1, head_dim=24)
    batch = paged_batch(geometry, rows, seed=9)
    torch.testing.assert_close(attend(ops, batch), attend(reference, batch), rtol=1e-5, atol=5e-6)


def test_a_head_is_read_no_further_than_its_end(ops: Backend, reference: Backend) -> None:
    """Behind the last head of a row's last position is a slot that nothing has written; it holds
    NaN. The row's keys fill whole rounds of the loop, in which the kernel masks no keys."""
    geometry = Geometry(block_size=24, num_heads=3, num_kv_heads=3, head_dim=10)
    batch = paged_batch(geometry, [(1, 64), (1, 128)], seed=11)
    assert batch.kv_layer.isnan().any()
    torch.testing.assert_close(attend(ops, batch), attend(reference, batch), rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(4, 4, 16), (6, 2, 24), (71, 1, 16)]
)
def test_the_tiles_of_hopper_attend_as_the_reference(
    ops: Backend,
    reference: Backend,
    monkeypatch: pytest.MonkeyPatch,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    window: int | None,
) -> None:
    monkeypatch.setattr(attention, "_is_hopper", lambda device: True)
    geometry = Geometry(16, num_heads, num_kv_heads, head_dim)
    batch = paged_batch(
        geometry, [(70, 300), (1, 129), (0, 20), (140, 140)], seed=12, window=window
    )
    torch.testing.assert_close(
        attend(ops, batch, window), attend(reference, batch, window), rtol=1e-5, atol=5e-6
    )


def test_fp16(ops: Backend, reference: Backend) -> None:
    geometry = Geometry(
        block_size=16, num_heads=4, num_kv_heads=2, head_dim=32, dtype=torch.float16
    )
    batch = paged_batch(geometry, [(1, 20), (5, 33)], seed=10)
    rtol, atol = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(attend(ops, batch), attend(reference, batch), rtol=rtol, atol=atol)


@pytest.mark.parametrize("block_size", [1, 16, 7])
def test_a_block_is_cleared_when_its_first_slot_is_written(flash: Backend, block_size: int) -> None:
    """Blocks 1 and 4 begin, block 2 continues (unless a block is one slot), and the others are not
    written. A block is longer than what a program clears at once."""
    arena = torch.full((6, 5, 2, block_size, 8, 128), float("nan"), dtype=torch.float16)
    slots = [block_size, -1, 4 * block_size, 3 * block_size - 1]
    flash.clear_begun_blocks(arena, torch.tensor(slots))
    begun = {1, 4} if block_size > 1 else {1, 2, 4}
    assert {i for i, block in enumerate(arena) if not block.any()} == begun
    assert all(block.isnan().all() for i, block in enumerate(arena) if i not in begun)


def test_old_content_of_a_block_reaches_no_row(flash: Backend, reference: Backend) -> None:
    """Without the clearing, 0 x NaN would reach a row."""
    geometry = Geometry(256, num_heads=2, num_kv_heads=1, head_dim=16, dtype=torch.float16)
    batch = paged_batch(geometry, [(300, 300), (7, 7)], seed=1)
    assert attend(flash, batch).isnan().any()

    arena = torch.full_like(batch.kv_layer[:, None], float("nan"))
    slots = [
        int(table[position // 256]) * 256 + position % 256
        for table, length in zip(batch.block_tables, [300, 7], strict=True)
        for position in range(length)
    ]
    flash.clear_begun_blocks(arena, torch.tensor(slots))
    flash.store_kv(arena[:, 0], torch.cat(batch.keys), torch.cat(batch.values), torch.tensor(slots))
    out = attend(flash, dataclasses.replace(batch, kv_layer=arena[:, 0]))
    rtol, atol = TOLERANCE[torch.bfloat16]
    torch.testing.assert_close(out, attend(reference, batch), rtol=rtol, atol=atol)
