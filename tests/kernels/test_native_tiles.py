"""Linears by tiles (AMX): the emulation equals exact arithmetic in the documented order, and the
hardware equals the emulation."""

import pytest
import torch
from torch import Tensor

import kvops
from bench.gpu.experts import randn
from kvops.native import Kind, NativeCpu, emulated_kernels, usable_kernels
from services.worker.config import WorkerSettings

from . import fused

BF16 = torch.bfloat16
TILES = [isa for isa in [*usable_kernels(), *emulated_kernels()] if isa.startswith("amx")]

pytestmark = pytest.mark.skipif(not TILES, reason="neither AMX nor AVX2, which emulates it")


@pytest.fixture(scope="module", params=TILES)
def cpu(request: pytest.FixtureRequest) -> NativeCpu:
    return NativeCpu(1, request.param)


def spread(*shape: int, exponents: float, seed: int) -> Tensor:
    """bf16 numbers with different exponents: sums lose digits, so that their order has an
    effect."""
    scales = torch.exp2(randn(*shape, seed=seed + 1) * exponents)
    return (randn(*shape, seed=seed) * scales).to(BF16)


def linear(cpu: NativeCpu, kind: Kind, x: Tensor, weight: Tensor) -> Tensor:
    out = torch.empty(len(x), len(weight))
    cpu.ops.linear(x, cpu.pack(kind, weight), out)
    return out


def in_tile_order(x: Tensor, weight: Tensor) -> Tensor:
    rows, columns = x.tolist(), weight.tolist()
    return torch.tensor([[fused.tile_dot(row, column) for column in columns] for row in rows])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("k", [1, 2, 31, 32, 33, 64, 70, 127])
def test_sums_are_those_of_the_documented_order(cpu: NativeCpu, k: int) -> None:
    x = spread(3, k, exponents=4, seed=k)
    weight = spread(34, k, exponents=4, seed=k + 2)
    assert same_bits(linear(cpu, "bfloat16", x, weight), in_tile_order(x, weight))


def test_another_order_of_addition_changes_the_sum(cpu: NativeCpu) -> None:
    """With the inputs above, summing the pairs one after another gives other bits."""
    x, weight = spread(3, 70, exponents=4, seed=70), spread(34, 70, exponents=4, seed=72)
    assert not same_bits(linear(cpu, "bfloat16", x, weight), in_tile_order(x, weight.flip(1)))
    assert not same_bits(
        linear(cpu, "bfloat16", x, weight), linear(NativeCpu(1, "portable"), "bfloat16", x, weight)
    )


def test_denormals_are_read_and_written_as_zero(cpu: NativeCpu) -> None:
    """Inputs that are denormal, products below the smallest normal number, and sums of normal
    numbers that cancel down to a denormal."""
    x = spread(4, 64, exponents=3, seed=1) * 2.0**-60
    weight = spread(33, 64, exponents=3, seed=2) * 2.0**-66
    x[1, ::3], weight[2, ::5] = 2.0**-130, -(2.0**-133)
    x[2], weight[3] = 0, 0
    x[2, :2], weight[3, :2] = torch.tensor([2.0**-60, -(2.0**-60)]), 2.0**-66
    weight[3, 1] = 2.0**-66 * (1 + 2.0**-7)
    actual = linear(cpu, "bfloat16", x, weight)
    assert same_bits(actual, in_tile_order(x, weight))
    kept = x.double() @ weight.double().T
    smallest = 2.0**-126
    assert not ((actual != 0) & (actual.abs() < smallest)).any()
    assert ((actual == 0) & (kept != 0)).any(), "nothing was flushed"
    assert (actual != 0).any(), "everything was"


@pytest.mark.parametrize("k", [600, 1024, 1037, 4500])
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4-64"])
def test_blocks_of_rows_panels_and_k_change_no_bit(cpu: NativeCpu, kind: Kind, k: int) -> None:
    """With a K of 4,500, 300 rows are three blocks, and their sums stay in memory between two parts
    of K; up to 32 rows keep theirs in the tiles."""
    dtype = BF16 if kind == "bfloat16" else torch.float32
    num_columns = 300 if k < 4500 else 70
    x, weight = randn(300, k).to(dtype), randn(num_columns, k, seed=1).to(dtype)
    together = linear(cpu, kind, x, weight)
    for begin, end in [(0, 1), (3, 20), (240, 272), (255, 257), (0, 33), (100, 300)]:
        assert same_bits(linear(cpu, kind, x[begin:end], weight), together[begin:end])


@pytest.mark.parametrize("epilogue", ["store", "silu_mul"])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_outputs_that_are_written_past_the_caches_are_the_same(
    cpu: NativeCpu, epilogue: str, dtype: torch.dtype
) -> None:
    """The outputs of 1,100 rows are more than L2 holds. The last panel has no other for a pair, and
    in `store` it is not full."""
    num_columns = 2 * 1056 if epilogue == "silu_mul" else 1050
    x, packed = randn(1100, 40).to(BF16), cpu.pack("bfloat16", randn(num_columns, 40, seed=1))
    width = 1056 if epilogue == "silu_mul" else 1050
    together = torch.full((1100, 1088), float("nan"), dtype=dtype)
    cpu.ops.linear(x, packed, together[:, :width], epilogue)
    assert together[:, width:].isnan().all()
    for begin, end in [(0, 40), (500, 560), (1060, 1100)]:
        out = torch.empty(end - begin, width, dtype=dtype)
        cpu.ops.linear(x[begin:end], packed, out, epilogue)
        assert torch.equal(out, together[begin:end, :width])


@pytest.mark.parametrize("count", [1, 16, 17, 32, 33])
def test_a_row_does_not_depend_on_a_row_of_nan(cpu: NativeCpu, count: int) -> None:
    x, weight = randn(count + 1, 96).to(BF16), randn(70, 96, seed=1).to(BF16)
    together = linear(cpu, "bfloat16", x, weight)
    for corrupted in {0, count // 2, count}:
        beside = x.clone()
        beside[corrupted] = float("nan")
        actual = linear(cpu, "bfloat16", beside, weight)
        assert actual[corrupted].isnan().all()
        actual[corrupted] = together[corrupted]
        assert same_bits(actual, together)


@pytest.mark.skipif("amx" not in usable_kernels(), reason="this CPU or its system has no AMX")
@pytest.mark.parametrize("kind", ["bfloat16", "int8", "int4-64"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 512), (17, 95, 77), (300, 300, 1037)])
def test_the_emulation_computes_what_amx_does(kind: Kind, m: int, n: int, k: int) -> None:
    dtype = BF16 if kind == "bfloat16" else torch.float32
    for scale in (1.0, 2.0**-62):
        x = (spread(m, k, exponents=4, seed=1) * scale).to(dtype)
        weight = (spread(n, k, exponents=4, seed=3) * scale).to(dtype)
        amx, emulated = (NativeCpu(1, isa) for isa in ("amx", "amx_emulated"))
        assert same_bits(linear(amx, kind, x, weight), linear(emulated, kind, x, weight))


@pytest.mark.skipif("avx2" not in usable_kernels(), reason="this CPU has no AVX2")
def test_the_emulation_is_built_for_tests() -> None:
    """With CMake's option QUIRE_EMULATED_AMX, as by `make setup`; packages have no emulation."""
    assert emulated_kernels() == ["amx_emulated"]


def test_an_emulation_is_chosen_by_tests_alone() -> None:
    assert not set(emulated_kernels()) & set(usable_kernels())
    assert NativeCpu().isa == usable_kernels()[0]
    for isa in emulated_kernels():
        assert NativeCpu(isa=isa).isa == isa
        with pytest.raises(ValueError, match="isa"):
            WorkerSettings.model_validate({"model": "/model", "isa": isa})


@pytest.mark.skipif("amx" in usable_kernels(), reason="this CPU has AMX")
def test_amx_is_refused_with_the_reason() -> None:
    with pytest.raises(kvops.BackendUnavailable, match=r"no kernels 'amx' on this CPU.*: .*AMX"):
        kvops.backend("cpu", "amx")
