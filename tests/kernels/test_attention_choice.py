"""The choice of the attention backend on a GPU, the refusals of each, and the calls of PyTorch's
and FlashInfer's functions. Stand-ins with the packages' signatures take their places."""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

import kvops
from bench.gpu.paged import Geometry, PagedBatch, attend, paged_batch, step_of
from kvops import AttentionShape, Backend, BackendUnavailable, choose_attention
from kvops.step import AttentionStep
from tests.fake_gpu import use_gpu

from . import flash_stand_in, flashinfer_stand_in
from .test_attention import ROWS, TOLERANCE
from .test_flash import BF16, GEOMETRIES, finite, shape_of

Gpu = Callable[..., None]
RTOL, ATOL = TOLERANCE[BF16]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Sets the GPU's capability and the installed packages."""

    def machine(capability: tuple[int, int], **packages: Any) -> None:
        use_gpu(monkeypatch, capability)
        for module in (
            "kvops.attention.flash",
            "kvops.attention.flash_package",
            "kvops.attention.flashinfer",
        ):
            monkeypatch.delitem(sys.modules, module, raising=False)
        for package in ("flash_attn", "flashinfer"):
            monkeypatch.setitem(sys.modules, package, packages.get(package))
        if "flashinfer" in packages:  # its buffers are on this machine
            ours = importlib.import_module("kvops.attention.flashinfer")
            monkeypatch.setattr(ours.FlashInferKernels, "device", "cpu")

    return machine


SHAPE = AttentionShape(32, 8, 128, 16, BF16, BF16, (None, 1024))
WIDE = AttentionShape(32, 8, 128, 256, BF16, BF16)
IN_FP8 = replace(WIDE, kv_dtype=torch.float8_e4m3fn)
ODD = AttentionShape(32, 8, 96, 16, BF16, BF16)
INSTALLED = {"flashinfer": flashinfer_stand_in}


@pytest.mark.parametrize(
    ("capability", "packages", "shape", "chosen", "reason"),
    [
        ((9, 0), INSTALLED, SHAPE, "flashinfer", "^capability 9.0$"),
        ((10, 0), INSTALLED, WIDE, "flashinfer", "^capability 10.0$"),
        ((9, 0), INSTALLED, ODD, "triton", "sizes 64, 128, 256, this model 96.*multiple of 256"),
        ((9, 0), {}, WIDE, "flash", "needs the package flashinfer-python"),
        ((9, 0), {}, SHAPE, "triton", "flashinfer-python.*multiple of 256, this pool has 16"),
        ((8, 0), INSTALLED, WIDE, "flash", "^capability 8.0$"),
        ((8, 9), INSTALLED, SHAPE, "triton", "^capability 8.9; .*multiple of 256"),
        ((9, 0), INSTALLED, IN_FP8, "flashinfer", "^capability 9.0$"),
        ((8, 0), INSTALLED, IN_FP8, "triton", "'flash' has no KV in fp8; 'triton' has"),
        (
            (9, 0),
            INSTALLED,
            replace(WIDE, has_sinks=True),
            "triton",
            "'flashinfer' has no sinks, .*'flash' has no sinks, .*choose --attention triton",
        ),
    ],
)
def test_auto_takes_the_first_that_serves_and_says_why(
    gpu: Gpu,
    capability: tuple[int, int],
    packages: dict[str, Any],
    shape: AttentionShape,
    chosen: str,
    reason: str,
) -> None:
    gpu(capability, **packages)
    ops, why = choose_attention("auto", shape)
    assert ops.name == chosen
    assert re.search(reason, why), why


def test_the_requested_attention_is_taken_or_refused(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu((9, 0), **INSTALLED)
    for name in ("flashinfer", "triton", "flash", "reference"):
        ops, why = choose_attention(name, WIDE)
        assert (ops.name.removeprefix("triton-"), why) == (name, "asked for")
    with pytest.raises(ValueError, match="no attention 'fast'; there are auto, flashinfer, flash"):
        choose_attention("fast", SHAPE)
    monkeypatch.setattr(flashinfer_stand_in, "__version__", "0.8.0")
    with pytest.raises(BackendUnavailable, match=r"needs flashinfer 0\.7, 0\.8\.0 is installed"):
        choose_attention("flashinfer", SHAPE)
    assert "needs flashinfer 0.7" in choose_attention("auto", SHAPE)[1]
    gpu((9, 0))
    with pytest.raises(BackendUnavailable, match="needs the package flashinfer-python"):
        choose_attention("flashinfer", SHAPE)


@pytest.mark.parametrize("name", ["flashinfer", "flash", "triton", "reference"])
@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (AttentionShape(7, 2, 64, 256, BF16, BF16), "7 query heads are no multiple of 2"),
        (AttentionShape(8, 2, 64, 256, BF16, torch.int8), "no KV in int8"),
    ],
)
def test_shapes_that_no_gpu_serves(
    gpu: Gpu, name: str, shape: AttentionShape, message: str
) -> None:
    gpu((9, 0), **INSTALLED)
    for attention in (name, "auto"):
        with pytest.raises(ValueError, match=message):
            choose_attention(attention, shape)


def test_flash_attn_is_used_where_it_is_installed(gpu: Gpu) -> None:
    gpu((9, 0), flash_attn=flash_stand_in)
    assert choose_attention("flash", WIDE)[0].numerics(BF16)["flash_attn"] == "2.8.3"
    gpu((9, 0))
    assert "flash_attn" not in choose_attention("flash", WIDE)[0].numerics(BF16)


# PyTorch's


@pytest.fixture
def flash(gpu: Gpu) -> Backend:
    gpu((9, 0))
    ops, _ = choose_attention("flash", WIDE)
    kernels: Any = ops._kernels
    assert kernels._attend is varlen_attn
    kernels._attend = varlen_stand_in
    return ops


def test_a_pytorch_without_paged_attention_is_refused(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu((9, 0))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", lambda query, key, value: query)
    with pytest.raises(BackendUnavailable, match=r"needs PyTorch 2\.13 .* this is PyTorch 2"):
        choose_attention("flash", WIDE)
    assert choose_attention("auto", WIDE)[0].name == "triton"


def varlen_stand_in(*args: Any, **kwargs: Any) -> Tensor:
    """A function with the signature of PyTorch's, checked also by PyTorch's own operator on `meta`
    tensors. It computes by the stand-in for flash-attn."""
    bound = inspect.signature(varlen_attn).bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    on_meta: Any = {
        name: value.to("meta") if isinstance(value, Tensor) else value
        for name, value in given.items()
    }
    out = varlen_attn(**on_meta)
    assert isinstance(out, Tensor)
    assert out.shape == given["query"].shape
    lens = given["seqused_k"]
    begins = given["cu_seq_k"]
    assert begins.dtype == torch.int32
    assert (begins.diff() >= lens).all()
    assert lens.max() <= given["max_k"]
    return flash_stand_in.flash_attn_varlen_func(
        given["query"],
        given["key"],
        given["value"],
        cu_seqlens_q=given["cu_seq_q"],
        cu_seqlens_k=torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0)),
        max_seqlen_q=given["max_q"],
        max_seqlen_k=given["max_k"],
        softmax_scale=given["scale"],
        causal=True,
        window_size=given["window_size"],
        block_table=given["block_table"],
    )


@pytest.mark.parametrize("rows", [ROWS["mixed, with an empty row"], [(1, 257), (20, 513)]])
@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_pytorch_s_attention_equals_the_reference(
    flash: Backend, reference: Backend, geometry: Geometry, rows: list[tuple[int, int]]
) -> None:
    batch = paged_batch(geometry, rows, seed=len(rows))
    torch.testing.assert_close(attend(flash, batch), attend(reference, batch), rtol=RTOL, atol=ATOL)


@pytest.mark.parametrize("window", [1, 300])
def test_pytorch_s_attention_slides_the_window(
    flash: Backend, reference: Backend, window: int
) -> None:
    rows = [(1, 600), (30, 300)]
    batch = finite(paged_batch(GEOMETRIES[0], rows, seed=window, window=window))
    torch.testing.assert_close(
        attend(flash, batch, window), attend(reference, batch, window), rtol=RTOL, atol=ATOL
    )


def test_pytorch_s_attention_has_no_soft_cap(flash: Backend, gpu: Gpu) -> None:
    capped = replace(WIDE, cap=50.0)
    with pytest.raises(ValueError, match="'flash' has no soft cap of the scores, which this model"):
        flash.check_attention(capped)
    with pytest.raises(ValueError, match="no soft cap"):
        attend(flash, paged_batch(GEOMETRIES[0], [(1, 3)], seed=0), cap=50.0)
    ops, why = choose_attention("auto", capped)
    assert (ops.name, "no soft cap" in why) == ("triton", True)


# FlashInfer's


@pytest.fixture
def flashinfer(gpu: Gpu) -> Iterator[Backend]:
    gpu((9, 0), **INSTALLED)
    yield choose_attention("flashinfer", SHAPE)[0]
    sys.modules.pop("kvops.attention.flashinfer")


def planned(
    ops: Backend,
    batch: PagedBatch,
    geometry: Geometry,
    *windows: int,
    scale: float | None = None,
    cap: float | None = None,
) -> None:
    shape = replace(shape_of(geometry, *windows), scale=scale, cap=cap)
    ops.plan(step_of(batch, shape, "cpu"))


PAGES = [
    Geometry(16, num_heads=8, num_kv_heads=2, head_dim=64, dtype=BF16),
    Geometry(7, num_heads=7, num_kv_heads=1, head_dim=128, dtype=torch.float16),
    Geometry(256, num_heads=4, num_kv_heads=4, head_dim=64, dtype=BF16),
    Geometry(16, num_heads=8, num_kv_heads=2, head_dim=128, dtype=BF16, in_fp8=True),
]


@pytest.mark.parametrize("rows", [ROWS["decode"], ROWS["mixed, with an empty row"]])
@pytest.mark.parametrize("geometry", PAGES, ids=str)
def test_flashinfer_equals_the_reference(
    flashinfer: Backend, reference: Backend, geometry: Geometry, rows: list[tuple[int, int]]
) -> None:
    """Pages of any size, in a strided view of the arena; one plan a step."""
    for seed in range(2):
        batch = paged_batch(geometry, rows, seed)
        planned(flashinfer, batch, geometry)
        torch.testing.assert_close(
            attend(flashinfer, batch), attend(reference, batch), rtol=RTOL, atol=ATOL
        )


def test_flashinfer_plans_each_window_of_the_layers(
    flashinfer: Backend, reference: Backend
) -> None:
    rows = [(1, 77), (40, 40), (5, 90)]
    batch = finite(paged_batch(PAGES[0], rows, seed=1))
    planned(flashinfer, batch, PAGES[0], 40, 1)
    for window in (40, 1):
        torch.testing.assert_close(
            attend(flashinfer, batch, window),
            attend(reference, batch, window),
            rtol=RTOL,
            atol=ATOL,
        )
    with pytest.raises(RuntimeError, match="no step is planned for layers with the window None"):
        attend(flashinfer, batch)
    with pytest.raises(ValueError, match=r"scale 1\.0 and cap None are not"):
        flashinfer.paged_attention(
            batch.q,
            batch.kv_layer,
            batch.block_tables,
            batch.cu_query_lens,
            batch.context_lens,
            1.0,
            40,
            max_query_len=40,
        )


def test_a_decode_step_that_exceeds_the_workspace_has_several_runs(
    flashinfer: Backend, reference: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Room for 3 splits of 16 positions: rows of 2, 1, 3, 1 and 1 splits need 3 runs. A row has
    the same bits as in a step of one run. Room is what the stand-in's planner needs."""
    ours = sys.modules["kvops.attention.flashinfer"]
    rows = [(1, 30), (1, 9), (1, 41), (1, 3), (1, 16)]
    batch = finite(paged_batch(PAGES[0], rows, seed=1))
    monkeypatch.setattr(ours, "_SPLIT", 16)
    planned(flashinfer, batch, PAGES[0])
    wanted = attend(flashinfer, batch)
    torch.testing.assert_close(wanted, attend(reference, batch), rtol=RTOL, atol=ATOL)
    kernels: Any = flashinfer._kernels
    assert len(kernels._planned[None]) == 1
    kernels._workspace, kernels._wrappers = None, {}
    monkeypatch.setattr(ours, "_WORKSPACE_BYTES", 3 * 4 * 8 * 16 * (64 + 1))
    planned(flashinfer, batch, PAGES[0])
    assert [run.num_tokens for run in kernels._planned[None]] == [2, 1, 2]
    assert torch.equal(attend(flashinfer, batch), wanted)
    planned(flashinfer, finite(paged_batch(PAGES[0], rows[:2], seed=1)), PAGES[0])
    assert [run.num_tokens for run in kernels._planned[None]] == [2]


def test_flashinfer_plans_scale_and_cap(flashinfer: Backend, reference: Backend) -> None:
    batch = finite(paged_batch(PAGES[0], [(1, 77), (5, 90)], seed=1))
    planned(flashinfer, batch, PAGES[0], scale=64**-0.5, cap=0.3)
    torch.testing.assert_close(
        attend(flashinfer, batch, cap=0.3), attend(reference, batch, cap=0.3), rtol=RTOL, atol=ATOL
    )
    with pytest.raises(ValueError, match="and cap None are not"):
        attend(flashinfer, batch)
    planned(flashinfer, batch, PAGES[0], scale=0.5)
    with pytest.raises(ValueError, match=r"scale 0\.125 and cap None are not \(0\.5, None\)"):
        attend(flashinfer, batch)


def test_the_kernels_of_flashinfer_follow_the_step(flashinfer: Backend) -> None:
    """Decode steps take the kernels that split contexts, other steps those of the GPU."""
    kernels: Any = flashinfer._kernels
    for rows in ([(1, 20), (1, 3)], [(2, 20), (0, 4), (1, 3)], [(1, 20), (9, 9)]):
        planned(flashinfer, paged_batch(PAGES[0], rows, seed=1), PAGES[0])
    used = {
        kind: (wrapper.backend, wrapper.plans)
        for (kind, window, *_), wrapper in kernels._wrappers.items()
        if window is None
    }
    assert used == {"decode": ("fa2", 2), "prefill": ("auto", 3)}  # the choice has planned, too


def test_long_prompts_fit_the_workspace_of_flashinfer(flashinfer: Backend) -> None:
    """A prefill of 8,192 tokens, 16k positions: partial results of splits would take 1 GiB. A
    decode step of 256 rows has splits, of which all partial results fit."""
    shape = replace(SHAPE, windows=(None,))
    for num_rows, new, num_pages in ((1, 8192, 1024), (256, 1, 1024)):
        begins = np.arange(num_rows + 1, dtype=np.int32)
        ids = torch.zeros(num_rows * num_pages, dtype=torch.int32)
        last = np.full(num_rows, 16, np.int32)
        flashinfer.plan(AttentionStep(shape, begins * new, begins * num_pages, last, ids))


def test_flashinfer_without_kernels_is_refused_at_start(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It compiles kernels when a step is planned. Without a compiler, auto takes another one."""

    def plan(*_args: Any, **_kwargs: Any) -> None:
        raise RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda'")

    gpu((9, 0), **INSTALLED)
    monkeypatch.setattr(flashinfer_stand_in.BatchPrefillWithPagedKVCacheWrapper, "plan", plan)
    wanted = r"install flashinfer-jit-cache 0\.7\.2\.post1, or nvcc: Could not find nvcc"
    with pytest.raises(ValueError, match=wanted):
        choose_attention("flashinfer", SHAPE)
    ops, why = choose_attention("auto", SHAPE)
    assert (ops.name, "Could not find nvcc" in why) == ("triton", True)


def test_results_name_the_package(flashinfer: Backend) -> None:
    numerics = flashinfer.numerics(BF16)
    assert (numerics["backend"], numerics["flashinfer"]) == ("flashinfer", "0.7.2.post1")


def test_nothing_is_chosen_without_a_gpu() -> None:
    with pytest.raises(BackendUnavailable, match="'triton' needs a CUDA device"):
        choose_attention("auto", SHAPE)
    with pytest.raises(BackendUnavailable, match="CUDA device"):
        kvops.backend("triton-reference")
