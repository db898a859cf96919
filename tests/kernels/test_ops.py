"""Every other operation: each backend equals the reference, and the reference equals PyTorch."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kvops import Backend
from kvops.step import HeadNorms

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
NAN = float("nan")


def randn(*shape: int, dtype: torch.dtype = FP32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_near(actual: Tensor, expected: Tensor) -> None:
    rtol, atol = (1e-5, 1e-5) if expected.dtype == FP32 else (1.6e-2, 1e-2)
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol)


@DTYPES
@pytest.mark.parametrize(("block_size", "num_tokens"), [(1, 1), (16, 40), (7, 13), (256, 300)])
def test_store_kv_writes_its_slots_and_nothing_else(
    ops: Backend, reference: Backend, dtype: torch.dtype, block_size: int, num_tokens: int
) -> None:
    """Every third token has slot -1; keys and values are views of one fused tensor."""
    num_blocks = num_tokens // block_size + 3
    slots = torch.randperm(num_blocks * block_size, generator=torch.Generator().manual_seed(1))
    slots = slots[:num_tokens].clone()
    slots[2::3] = -1
    fused = randn(num_tokens, 2 * 3, 8, dtype=dtype)
    arenas = []
    for backend in (ops, reference):
        arena = torch.full((num_blocks, 2, 2, block_size, 3, 8), NAN, dtype=dtype)
        backend.store_kv(arena[:, 1], fused[:, :3], fused[:, 3:], slots)
        arenas.append(arena)
    assert torch.equal(arenas[0].nan_to_num(123.0), arenas[1].nan_to_num(123.0))
    stored = arenas[0][:, 1, 0].reshape(-1, 3, 8)[slots[slots >= 0]]
    assert torch.equal(stored, fused[:, :3][slots >= 0])
    assert arenas[0].isfinite().sum() == (slots >= 0).sum() * 2 * 3 * 8


def test_store_kv_of_nothing_at_all(ops: Backend) -> None:
    arena = torch.full((2, 1, 2, 4, 1, 8), NAN)
    ops.store_kv(arena[:, 0], randn(3, 1, 8), randn(3, 1, 8), torch.tensor([-1, -1, -1]))
    assert arena.isnan().all()


def test_copy_blocks_reads_every_source_before_it_writes(ops: Backend, reference: Backend) -> None:
    """Blocks 0 and 1 swap places; 3 is copied to 2 and 4."""
    pairs = torch.tensor([[0, 1], [1, 0], [3, 2], [3, 4]])
    for backend in (ops, reference):
        arena = randn(6, 2, 2, 4, 1, 8)
        before = arena.clone()
        backend.copy_blocks(arena, pairs)
        assert torch.equal(arena, before[[1, 0, 3, 3, 3, 5]])


def test_copy_blocks_from_another_arena(ops: Backend, reference: Backend) -> None:
    """Blocks 0, 1 and 2 are adjacent, 4 is copied to 0 and 5, and the source does not change."""
    pairs = torch.tensor([[0, 1], [1, 2], [2, 3], [4, 0], [4, 5]])
    for backend in (ops, reference):
        arena, source = randn(7, 2, 2, 4, 1, 8), randn(5, 2, 2, 4, 1, 8)
        before, source_before = arena.clone(), source.clone()
        backend.copy_blocks(arena, pairs, source)
        assert torch.equal(arena[[1, 2, 3, 0, 5]], source[[0, 1, 2, 4, 4]])
        assert torch.equal(arena[[4, 6]], before[[4, 6]])
        assert torch.equal(source, source_before)


def test_copying_no_blocks_changes_nothing(ops: Backend) -> None:
    arena = randn(2, 1, 2, 4, 1, 8)
    before = arena.clone()
    ops.copy_blocks(arena, torch.empty((0, 2), dtype=torch.int64))
    assert torch.equal(arena, before)


@DTYPES
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1, 64, 32), (5, 33, 7), (64, 128, 321)], ids=str)
def test_linear(
    ops: Backend, reference: Backend, dtype: torch.dtype, bias: bool, shape: tuple[int, int, int]
) -> None:
    tokens, wide, out = shape
    x = randn(tokens, wide, dtype=dtype)
    weight = randn(out, wide, dtype=dtype, seed=1) / wide**0.5
    b = randn(out, dtype=dtype, seed=2) if bias else None
    expected = reference.linear(x, weight, b)
    assert_near(ops.linear(x, weight, b), expected)
    exact = x.double() @ weight.double().T + (0 if b is None else b.double())
    assert_near(expected, exact.to(dtype))


@DTYPES
@pytest.mark.parametrize("shape", [(1, 64), (5, 33), (9, 4, 16)], ids=str)
def test_rms_norm(
    ops: Backend, reference: Backend, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    x, weight = randn(*shape, dtype=dtype), randn(shape[-1], dtype=dtype, seed=1)
    expected = reference.rms_norm(x, weight, 1e-6)
    assert_near(ops.rms_norm(x, weight, 1e-6), expected)
    assert_near(expected, F.rms_norm(x, (shape[-1],), weight, 1e-6))


def test_rms_norm_of_zeros_is_zero(ops: Backend, reference: Backend) -> None:
    for backend in (ops, reference):
        normed = backend.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6)
        assert torch.equal(normed, torch.zeros(2, 8))


@DTYPES
def test_add_rms_norm_adds_in_place_and_norms_the_sum(
    ops: Backend, reference: Backend, dtype: torch.dtype
) -> None:
    x, weight = randn(5, 48, dtype=dtype), randn(48, dtype=dtype, seed=1)
    before = randn(5, 48, dtype=dtype, seed=2)
    expected = reference.rms_norm(before + x, weight, 1e-5)
    for backend in (ops, reference):
        residual = before.clone()
        assert_near(backend.add_rms_norm(x, residual, weight, 1e-5), expected)
        assert torch.equal(residual, before + x)


def turned(backend: Backend, q: Tensor, k: Tensor, angles: Tensor) -> Tensor:
    """Queries and stored keys after their rotation."""
    arena, slots = k.new_zeros(1, 1, 2, 16, *k.shape[1:]), torch.arange(len(k))
    rotation = angles.cos(), angles.sin()
    queries = backend.store_heads(arena[:, 0], q.clone(), k.clone(), k, slots, None, rotation)
    return torch.cat([queries, arena[0, 0, 0, : len(k)]], dim=1)


@DTYPES
@pytest.mark.parametrize("head_dim", [2, 16, 128])
def test_queries_and_keys_are_rotated(
    ops: Backend, reference: Backend, dtype: torch.dtype, head_dim: int
) -> None:
    angles = randn(6, head_dim // 2, seed=1) * 3
    fused = randn(6, 4 + 2, head_dim, dtype=dtype)
    results = [turned(backend, fused[:, :4], fused[:, 4:], angles) for backend in (ops, reference)]
    assert_near(results[0], results[1])
    assert_near(results[1], rotate_as_complex(fused, angles))


def rotate_as_complex(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.double().chunk(2, dim=-1)
    turned = torch.complex(first, second) * torch.exp(1j * angles.double())[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1).to(x.dtype)


def test_the_first_dimensions_of_heads_are_rotated(ops: Backend, reference: Backend) -> None:
    angles = randn(6, 3, seed=1) * 3
    q, k = randn(6, 4, 10), randn(6, 2, 10, seed=2)
    x = torch.cat([q, k], dim=1)
    for backend in (ops, reference):
        found = turned(backend, q, k, angles)
        assert torch.equal(found[..., 6:], x[..., 6:])
        assert_near(found[..., :6], rotate_as_complex(x[..., :6], angles))


@DTYPES
@pytest.mark.parametrize("norms", ["none", "of heads", "of all heads", "of all key heads"])
@pytest.mark.parametrize("turned", [0, 6, 10])
def test_store_heads_norms_turns_and_stores(
    ops: Backend, reference: Backend, dtype: torch.dtype, norms: str, turned: int
) -> None:
    """As the operations one after the other; heads are views of one fused tensor. Heads are as many
    as no power of two. The last token has no slot."""
    fused, angles = randn(5, 9 + 3 + 3, 10, dtype=dtype), randn(5, turned // 2, seed=1) * 3
    slots = torch.tensor([3, 40, 17, 5, -1])
    rotation = (angles.cos(), angles.sin()) if turned else None
    sizes = {
        "none": (),
        "of heads": (10, 10),
        "of all heads": (90, 30),
        "of all key heads": (10, 30),
    }[norms]
    query_and_key = [1 + randn(size, dtype=dtype, seed=size) for size in sizes]
    weights = HeadNorms(query_and_key[0], query_and_key[1], 1e-5) if sizes else None
    arenas, queries = [], []
    for backend in (ops, reference):
        q, k, v = torch.split(fused.clone(), [9, 3, 3], dim=1)
        arena = torch.full((3, 2, 2, 16, 3, 10), 7.0, dtype=dtype)
        queries.append(backend.store_heads(arena[:, 1], q, k, v, slots, weights, rotation))
        arenas.append(arena)
    q, k, v = torch.split(fused.clone(), [9, 3, 3], dim=1)
    if weights:
        q = reference.rms_norm(q.reshape(-1, sizes[0]), weights.query, 1e-5).view(q.shape)
        k = reference.rms_norm(k.reshape(-1, sizes[1]), weights.key, 1e-5).view(k.shape)
    if rotation:
        width = 2 * len(rotation[0][0])
        for x in (q, k):
            x[..., :width] = rotate_as_complex(x[..., :width], angles)
    assert_near(queries[0], q)
    assert_near(queries[1], q)
    expected = torch.full_like(arenas[0], 7.0)
    reference.store_kv(expected[:, 1], k, v, slots)
    assert_near(arenas[0], expected)
    assert_near(arenas[1], expected)


def test_store_heads_refuses_norms_of_other_widths(ops: Backend) -> None:
    q, k, v = torch.split(randn(5, 9 + 3 + 3, 10), [9, 3, 3], dim=1)
    arena, slots = torch.zeros(3, 2, 2, 16, 3, 10), torch.arange(5)
    norms = HeadNorms(randn(10), randn(20), 1e-5)
    with pytest.raises(ValueError, match=r"weight: float32 \[20\]"):
        ops.store_heads(arena[:, 1], q, k, v, slots, norms)
    with pytest.raises(ValueError, match="cos: "):
        ops.store_heads(arena[:, 1], q, k, v, slots, None, (randn(5, 6), randn(5, 6)))
    assert not arena.any()


def test_rms_norm_takes_weights_in_fp32(ops: Backend, reference: Backend) -> None:
    """The weights would change if bf16 rounded them."""
    x, weight = randn(5, 48, dtype=torch.bfloat16), 1 + randn(48, seed=1) * 2**-10
    expected = reference.rms_norm(x.float(), weight, 1e-6).bfloat16()
    for backend in (ops, reference):
        assert_near(backend.rms_norm(x, weight, 1e-6), expected)
        assert_near(backend.add_rms_norm(x, torch.zeros_like(x), weight, 1e-6), expected)


@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul"])
@DTYPES
def test_silu_mul_and_gelu_mul_take_halves_of_a_fused_tensor(
    ops: Backend, reference: Backend, dtype: torch.dtype, name: str
) -> None:
    fused = randn(5, 2 * 24, dtype=dtype)
    before = fused.clone()
    gate, up = fused.chunk(2, dim=-1)
    expected = getattr(reference, name)(gate, up)
    assert_near(getattr(ops, name)(gate, up), expected)
    wide = gate.double()
    activated = F.silu(wide) if name == "silu_mul" else F.gelu(wide, approximate="tanh")
    assert_near(expected, (activated * up.double()).to(dtype))
    assert torch.equal(fused, before)
