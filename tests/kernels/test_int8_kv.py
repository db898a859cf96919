"""Keys and values in int8: the stored bytes, and the operations that store them."""

from typing import Any

import pytest
import torch
from torch import Tensor

import kvops
from bench.gpu.experts import randn
from kvops import int8_kv
from kvops.native import NativeCpu, emulated_kernels, usable_kernels
from kvops.reference import ReferenceKernels

NAN, INF = float("nan"), float("inf")
HEAD_DIM, NUM_KV_HEADS, BLOCK_SIZE = 20, 3, 4
SLOTS = torch.tensor([3, -1, 0, 14, 8])


def arena() -> Tensor:
    """One layer of four blocks whose heads are NaN."""
    layer = torch.full((4, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM), NAN)
    return int8_kv.quantize(layer)


def test_a_head_is_within_half_a_step_and_its_largest_is_exact() -> None:
    x = randn(50, HEAD_DIM)
    heads = int8_kv.quantize(x)
    assert heads.shape == (50, HEAD_DIM + int8_kv.SCALE_BYTES)
    error = (int8_kv.dequantize(heads) - x).abs()
    assert (error <= 0.5001 * int8_kv.scales(heads)).all()
    assert (heads[:, :HEAD_DIM].abs().amax(dim=-1) == 127).all()


def test_a_head_of_next_to_nothing_is_zeros() -> None:
    heads = int8_kv.quantize(torch.tensor([[0.0, -0.0], [1e-45, 0.0], [1e-38, -1e-38]]))
    assert torch.equal(int8_kv.dequantize(heads), torch.zeros(3, 2))


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_a_head_that_is_not_finite_has_no_number(poison: float) -> None:
    x = randn(2, HEAD_DIM)
    x[0, 7] = poison
    found = int8_kv.dequantize(int8_kv.quantize(x))
    assert found[0].isnan().all()
    assert found[1].isfinite().all()


@pytest.mark.parametrize("isa", [*usable_kernels(), *emulated_kernels()])
@pytest.mark.parametrize("poison", [0.5, NAN, INF])
def test_native_kernels_store_the_bytes_of_quantized_heads(isa: str, poison: float) -> None:
    """The expected heads are those that the same kernels store in fp32. Slot -1 is not stored."""
    num_heads = 5
    qkv = randn(len(SLOTS), (num_heads + 2 * NUM_KV_HEADS) * HEAD_DIM)
    qkv[2, num_heads * HEAD_DIM + 5] = poison
    qkv[3, -1] = poison
    cos, sin = randn(50, HEAD_DIM // 2, seed=1), randn(50, HEAD_DIM // 2, seed=2)
    norms = (randn(HEAD_DIM, seed=3), randn(HEAD_DIM, seed=4))
    positions = torch.tensor([0, 49, 7, 8, 8])
    found, exact = arena(), torch.full((4, 2, BLOCK_SIZE, NUM_KV_HEADS, HEAD_DIM), NAN)
    for layer in (found, exact):
        q = torch.empty(len(SLOTS), num_heads, HEAD_DIM)
        NativeCpu(1, isa).ops.qkv(qkv, *norms, 1e-6, cos, sin, positions, SLOTS, q, layer)
    expected = int8_kv.quantize(exact)
    assert torch.equal(found[..., :HEAD_DIM], expected[..., :HEAD_DIM])
    torch.testing.assert_close(
        int8_kv.scales(found), int8_kv.scales(expected), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("name", ["cpu", "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backends_store_and_copy_heads_in_int8(name: str, dtype: torch.dtype) -> None:
    k, v = (randn(len(SLOTS), NUM_KV_HEADS, HEAD_DIM, seed=seed).to(dtype) for seed in (5, 6))
    backend, layer, empty = kvops.backend(name), arena(), arena()
    backend.store_kv(layer, k, v, SLOTS)
    for token, slot in enumerate(SLOTS.tolist()):
        if slot == -1:
            continue
        block, offset = divmod(slot, BLOCK_SIZE)
        assert torch.equal(layer[block, 0, offset], int8_kv.quantize(k[token]))
        assert torch.equal(layer[block, 1, offset], int8_kv.quantize(v[token]))
    assert torch.equal(layer[1], empty[1])
    backend.copy_blocks(layer, torch.tensor([[3, 1]]))
    assert torch.equal(layer[1], layer[3])


def test_a_backend_without_int8_refuses_such_an_arena() -> None:
    class WithoutInt8(ReferenceKernels):
        kv_dtypes: Any = ()

    k = randn(1, NUM_KV_HEADS, HEAD_DIM)
    with pytest.raises(ValueError, match="of a dtype that backend 'reference' has"):
        kvops.Backend(WithoutInt8()).store_kv(arena(), k, k, torch.tensor([0]))


def test_keys_and_values_of_another_head_size_are_refused() -> None:
    k = randn(1, NUM_KV_HEADS, HEAD_DIM + int8_kv.SCALE_BYTES)
    with pytest.raises(ValueError, match=r"k: float32 \[1, 3, 24\]"):
        kvops.backend("cpu").store_kv(arena(), k, k, torch.tensor([0]))
