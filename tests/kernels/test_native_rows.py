"""The native row kernels of every instruction set that this CPU has: norms, rotation, stores and
quantization against fp64, and bitwise against themselves."""

import pytest
import torch
from torch import Tensor

from bench.gpu.experts import randn
from kvops.native import NativeCpu

FP32, BF16 = torch.float32, torch.bfloat16
DTYPES = pytest.mark.parametrize("dtype", [FP32, BF16], ids=["fp32", "bf16"])
NAN, INF = float("nan"), float("inf")
EPS = 1e-6
# Of a result's magnitude: roundings in fp32, and one to bf16.
ERROR = {FP32: 1e-6, BF16: 2**-8 + 1e-6}


def norm(cpu: NativeCpu, x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The output, written into the middle of NaN: an element that is missing, or written beside it,
    shows."""
    rows, width = x.shape
    poisoned = torch.full((rows, width + 34), NAN, dtype=dtype)
    cpu.ops.rms_norm(x, weight, EPS, poisoned[:, 2 : 2 + width])
    assert poisoned[:, :2].isnan().all()
    assert poisoned[:, 2 + width :].isnan().all()
    return poisoned[:, 2 : 2 + width]


def normed(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.double()
    return wide / torch.sqrt(wide.square().mean(dim=-1, keepdim=True) + EPS) * weight.double()


@DTYPES
@pytest.mark.parametrize("width", [2, 16, 30, 64, 100, 1024, 3072])
def test_rms_norm(cpu: NativeCpu, dtype: torch.dtype, width: int) -> None:
    fused, weight = randn(5, width + 3), randn(width, seed=1)
    x = fused[:, 1 : 1 + width]
    expected = normed(x, weight)
    error = (norm(cpu, x, weight, dtype).double() - expected).abs()
    assert (error <= ERROR[dtype] * expected.abs()).all()


def test_a_row_s_norm_depends_neither_on_other_rows_nor_on_threads(cpu: NativeCpu) -> None:
    x, weight = randn(100, 1024), randn(1024, seed=1)
    together = norm(cpu, x, weight, FP32)
    assert torch.equal(norm(NativeCpu(2, cpu.isa), x, weight, FP32), together)
    for row in (0, 17, 99):
        assert torch.equal(norm(cpu, x[row : row + 1], weight, FP32), together[row : row + 1])


def test_a_row_of_zeros_is_normed_to_zeros(cpu: NativeCpu) -> None:
    assert torch.equal(norm(cpu, torch.zeros(2, 48), torch.ones(48), FP32), torch.zeros(2, 48))


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_non_finite_values_stay_visible_through_a_norm(cpu: NativeCpu, poison: float) -> None:
    x = randn(3, 48)
    x[1, 40] = poison
    out = norm(cpu, x, torch.ones(48), BF16)
    assert out[1, 40].isnan()
    assert out[[0, 2]].isfinite().all()


def quantized(cpu: NativeCpu, x: Tensor) -> Tensor:
    """x as 16-bit integers with a scale per row: the output of a linear whose weights are the
    identity."""
    if cpu.isa.startswith("amx"):
        pytest.skip("tiles take bf16")
    width = x.shape[1]
    identity = cpu.pack("int8", 127 * torch.eye(width))
    out = torch.full((len(x), width), NAN)
    cpu.ops.linear(x, identity, out)
    return out / 127


@pytest.mark.parametrize("width", [3, 16, 40, 257])
def test_a_quantized_row_is_within_half_a_step(cpu: NativeCpu, width: int) -> None:
    x = randn(6, width) * torch.logspace(-20, 10, 6)[:, None]
    step = x.abs().amax(dim=1, keepdim=True) / 32767
    error = (quantized(cpu, x) - x).abs()
    assert (error <= step * 0.52).all()
    assert (error > step * 0.3).any()  # they are integers indeed


def test_the_largest_of_a_quantized_row_is_kept(cpu: NativeCpu) -> None:
    x = torch.tensor([[0.5, -2.54, 1.0], [3.0, 0.0, 0.0]])
    torch.testing.assert_close(quantized(cpu, x), x, rtol=1e-6, atol=0.51 * 2.54 / 32767)
    assert float(quantized(cpu, x)[0, 1]) == pytest.approx(-2.54, rel=1e-6)


def test_a_quantized_row_of_zeros_or_next_to_nothing_is_zeros(cpu: NativeCpu) -> None:
    x = torch.zeros(3, 20)
    x[1] = 1e-45
    x[2] = -1e-34
    assert torch.equal(quantized(cpu, x).abs(), torch.zeros(3, 20))


@pytest.mark.parametrize("poison", [NAN, -NAN, INF, -INF])
def test_a_quantized_row_that_is_not_finite_is_nan(cpu: NativeCpu, poison: float) -> None:
    x = randn(3, 20)
    x[1, 18] = poison
    out = quantized(cpu, x)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


NUM_HEADS, NUM_KV_HEADS, BLOCK_SIZE = 5, 2, 3
POSITIONS = torch.tensor([0, 49, 7, 8, 8, 30, 31])
SLOTS = torch.tensor([3, -1, 0, 14, 8, 9, 10])


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T, heads, D], rotated in GPT-NeoX's halves, in as many dimensions as there are angles
    for."""
    width = 2 * cos.shape[1]
    first, second = x[..., :width].chunk(2, dim=-1)
    cos, sin = cos[POSITIONS, None].double(), sin[POSITIONS, None].double()
    turned = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat((*turned, x[..., width:]), dim=-1)


def store_qkv(
    cpu: NativeCpu,
    qkv: Tensor,
    norms: tuple[Tensor, Tensor] | None,
    angles: tuple[Tensor, Tensor],
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """q [T, H, D], and one layer of an arena of NaN [blocks, 2, block_size, K, D]."""
    head_dim = qkv.shape[1] // (NUM_HEADS + 2 * NUM_KV_HEADS)
    q = torch.full((len(qkv), NUM_HEADS, head_dim), NAN, dtype=dtype)
    arena = torch.full((5, 2, 2, BLOCK_SIZE, NUM_KV_HEADS, head_dim), NAN, dtype=dtype)
    query_norm, key_norm = norms or (None, None)
    cpu.ops.qkv(qkv, query_norm, key_norm, EPS, *angles, POSITIONS, SLOTS, q, arena[:, 1])
    assert arena[:, 0].isnan().all()
    return q, arena[:, 1]


@DTYPES
@pytest.mark.parametrize("with_norms", [True, False])
@pytest.mark.parametrize(
    ("head_dim", "width"),
    [(2, 2), (10, 10), (64, 64), (96, 96), (128, 128), (256, 256), (10, 4), (96, 72), (128, 32)],
)
def test_queries_keys_and_values_find_their_places(
    cpu: NativeCpu, head_dim: int, width: int, with_norms: bool, dtype: torch.dtype
) -> None:
    """Values are normed, rotated and rounded once. Token 1 has slot -1: its query is computed, and
    nothing is stored."""
    qkv = randn(7, (NUM_HEADS + 2 * NUM_KV_HEADS) * head_dim)
    norms = (randn(head_dim, seed=1), randn(head_dim, seed=2)) if with_norms else None
    angles = torch.rand(50, width // 2) * 6
    cos, sin = angles.cos(), angles.sin()
    q, kv = store_qkv(cpu, qkv, norms, (cos, sin), dtype)

    heads = qkv.double().view(7, -1, head_dim)
    queries, keys = heads[:, :NUM_HEADS], heads[:, NUM_HEADS:-NUM_KV_HEADS]
    values = heads[:, -NUM_KV_HEADS:]
    if norms:
        queries, keys = normed(queries, norms[0]), normed(keys, norms[1])
    stored = SLOTS >= 0
    slots = SLOTS[stored]
    blocks, offsets = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    pairs = [
        (q, rotated(queries, cos, sin)),
        (kv[blocks, 0, offsets], rotated(keys, cos, sin)[stored]),
        (kv[blocks, 1, offsets], values[stored]),
    ]
    for actual, expected in pairs:
        # A rotation may cancel: what was rotated bounds the error.
        allowed = ERROR[dtype] * expected.abs() + 1e-6 * expected.abs().amax(dim=-1, keepdim=True)
        assert ((actual.double() - expected).abs() <= allowed).all()
    assert kv.isfinite().sum() == len(slots) * 2 * NUM_KV_HEADS * head_dim


@pytest.mark.parametrize("poison", [NAN, INF])
def test_non_finite_values_stay_visible_in_the_arena(cpu: NativeCpu, poison: float) -> None:
    """Token 0 has slot 3: block 1, offset 0. Its first key head and its last value head are not
    finite."""
    qkv = randn(7, (NUM_HEADS + 2 * NUM_KV_HEADS) * 32)
    qkv[0, NUM_HEADS * 32 + 5] = poison
    qkv[0, -1] = poison
    norms = (torch.ones(32), torch.ones(32))
    angles = (torch.ones(50, 16), torch.zeros(50, 16))
    _, kv = store_qkv(cpu, qkv, norms, angles, BF16)
    assert not kv[1, 0, 0, 0, 5].isfinite()
    assert not kv[1, 1, 0, 1, 31].isfinite()
    assert kv[1, 0, 0, 1].isfinite().all()
    assert kv[1, 1, 0, 0].isfinite().all()
