"""Triton's kernels compile for GPUs, fit into their shared memory, use tensor cores, and are few:
properties that the interpreter cannot check. No GPU is needed: each launch is compiled, and does
not run."""

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

from bench.gpu.experts import in_dtype, weights_of
from kvops import AttentionShape, Backend
from kvops.grouped import GroupedWeight, like
from kvops.quantized import Kind
from kvops.step import HeadNorms
from kvops.triton import TritonKernels, attention, linears
from kvops.triton.experts import experts
from kvops.triton.fusions import clear_begun_blocks
from kvops.triton.linears import LINEAR_ROWS

FULL = pytest.mark.full
"""`make test` compiles of each kind the kernels that differ most: one takes seconds to compile."""

SHARED_BYTES = 99 * 1024
"""Shared memory of a block on capabilities 8.6 and 8.9, the smallest since 8.0."""


class Target:
    """The part of Triton's driver that compiling needs. Compiled kernels are kept by device, so
    each capability is another device."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self._capability, 32)

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, _device: int) -> int:
        return 0


@contextmanager
def compiling(capability: int, cache: Path) -> Iterator[list[Any]]:
    """Within the block, launches only compile for this capability; the list gets the compiled
    kernels."""
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(run(self, *args, warmup=True, **kwargs))

    with triton.knobs.cache.scope(), pytest.MonkeyPatch.context() as patch:
        triton.knobs.cache.dir = str(cache)
        patch.setattr(triton.runtime.driver, "_active", Target(capability))
        patch.setattr(JITFunction, "run", compile_only)
        yield compiled


@pytest.fixture(
    params=[
        pytest.param(80, id="sm_80"),
        pytest.param(90, id="sm_90", marks=FULL),
        pytest.param(100, id="sm_100", marks=FULL),
    ]
)
def capability(request: pytest.FixtureRequest) -> int:
    number: int = request.param
    return number


OPS = Backend(TritonKernels())


def attend(num_tokens: int, num_rows: int, head_dim: int, dtype: torch.dtype) -> None:
    arena = torch.zeros(4, 2, 2, 16, 2, head_dim, dtype=dtype)
    OPS.paged_attention(
        torch.zeros(num_tokens, 8, head_dim, dtype=dtype),
        arena[:, 1],
        torch.zeros(num_rows, 40, dtype=torch.int32),
        torch.zeros(num_rows + 1, dtype=torch.int32),
        torch.ones(num_rows, dtype=torch.int32),
        1.0,
        max_query_len=-(-num_tokens // num_rows),
    )


def different(compiled: list[Any]) -> list[Any]:
    """The compiled kernels, each once. They fit the smallest shared memory."""
    kernels = list({id(kernel): kernel for kernel in compiled}.values())
    assert all(kernel.metadata.shared <= SHARED_BYTES for kernel in kernels)
    return kernels


def loads_that_loops_wait_for(ptx: str) -> set[str]:
    """The kinds of loads from global memory in a kernel's loops that are not asynchronous copies
    into shared memory."""
    lines = ptx.splitlines()
    labels = {line.split(":")[0]: i for i, line in enumerate(lines) if line.startswith("$L__BB")}
    loops = [
        lines[labels[found[1]] : i]
        for i, line in enumerate(lines)
        if (found := re.search(r"\bbra\S*\s+(\$L__BB\w+)", line)) and labels.get(found[1], i) < i
    ]
    assert loops
    assert all("cp.async" in "".join(loop) for loop in loops)
    return {kind for loop in loops for kind in re.findall(r"\bld\.global\S*", "".join(loop))}


@pytest.mark.parametrize(
    ("num_tokens", "head_dim", "dtype"),
    [
        (4, 128, torch.bfloat16),
        (200, 128, torch.bfloat16),
        (4, 32, torch.float32),
        pytest.param(4, 256, torch.bfloat16, marks=FULL),
        pytest.param(200, 256, torch.bfloat16, marks=FULL),
        pytest.param(200, 32, torch.float32, marks=FULL),
    ],
)
def test_attention_compiles(
    capability: int, tmp_path: Path, num_tokens: int, head_dim: int, dtype: torch.dtype
) -> None:
    with compiling(capability, tmp_path) as compiled:
        attend(num_tokens, 4, head_dim, dtype)
    assert [kernel.metadata.name for kernel in compiled] == (
        ["attend", "combine"] if num_tokens == 4 else ["attend"]
    )
    assert all(kernel.metadata.shared <= SHARED_BYTES for kernel in compiled)
    has_two_stages = num_tokens == 200 and head_dim < 256
    of_block_table = {"ld.global.b32"} if has_two_stages else set()
    assert loads_that_loops_wait_for(compiled[0].asm["ptx"]) == of_block_table
    on_tensor_cores = "mma" in compiled[0].asm["ptx"]
    assert on_tensor_cores == (dtype == torch.bfloat16)  # in fp32 they would round to tf32


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (128, torch.bfloat16),
        pytest.param(32, torch.float32, marks=FULL),
        pytest.param(64, torch.bfloat16, marks=FULL),
        pytest.param(96, torch.float16, marks=FULL),
    ],
)
def test_hopper_s_tiles_fit_its_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head_dim: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(attention, "_is_hopper", lambda device: True)
    with compiling(90, tmp_path) as compiled:
        attend(200, 4, head_dim, dtype)
    (kernel,) = compiled
    assert kernel.metadata.shared <= 227 * 1024
    assert ("wgmma" in kernel.asm["ptx"]) == (dtype != torch.float32)


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=FULL)])
@pytest.mark.parametrize("converts", [False, True], ids=["by bits", "by instructions"])
def test_keys_and_values_in_fp8_compile(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, converts: bool, head_dim: int
) -> None:
    """They are copied asynchronously as bytes. Capability 8.0 has no instructions for fp8."""
    if converts and capability == 80:
        capability = 89
    monkeypatch.setattr(attention, "has_fp8", lambda device: converts)
    arena = torch.zeros(4, 2, 2, 16, 2, head_dim).to(torch.float8_e4m3fn)
    shape = AttentionShape(8, 2, head_dim, 16, torch.bfloat16, arena.dtype)
    x, slots = torch.zeros(4, 12, head_dim).bfloat16(), torch.arange(4)
    with compiling(capability, tmp_path) as compiled:
        OPS.warm_up(arena[:, 1], shape, 16)
        OPS.store_kv(arena[:, 1], x[:, :2], x[:, :2], slots)
        OPS.store_heads(arena[:, 1], x[:, :8], x[:, 8:10], x[:, 10:], slots)
        clear_begun_blocks(arena, slots)
    kernels = different(compiled)
    attending = [kernel.asm["ptx"] for kernel in kernels if kernel.metadata.name == "attend"]
    assert len(attending) == 3
    for ptx in attending:
        assert loads_that_loops_wait_for(ptx) <= {"ld.global.b32"}  # of the block table
        assert "mma" in ptx
        assert ("e4m3x2" in ptx) == converts


def test_attention_with_sinks_compiles(capability: int, tmp_path: Path) -> None:
    arena = torch.zeros(4, 2, 2, 16, 2, 64, dtype=torch.bfloat16)
    shape = AttentionShape(
        8, 2, 64, 16, arena.dtype, arena.dtype, windows=(128, None), has_sinks=True
    )
    with compiling(capability, tmp_path) as compiled:
        OPS.warm_up(arena[:, 1], shape, 16)
    assert len(different(compiled)) == 4


@pytest.mark.parametrize(
    ("dtype", "swiglu", "kind"),
    [
        (torch.bfloat16, True, None),
        (torch.float32, False, None),
        (torch.bfloat16, False, "int4-32"),
        (torch.bfloat16, False, "mxfp4"),
        pytest.param(torch.bfloat16, False, None, marks=FULL),
        pytest.param(torch.float32, True, None, marks=FULL),
        pytest.param(torch.bfloat16, False, "fp8-128", marks=FULL),
        pytest.param(torch.bfloat16, False, "int8", marks=FULL),
    ],
)
def test_experts_compile(
    capability: int, tmp_path: Path, dtype: torch.dtype, swiglu: bool, kind: Kind | None
) -> None:
    """They take the same kernels for any number of rows, and wait for no load in their loops."""
    weights = in_dtype(weights_of(8, 3, hidden=256, wide=384, swiglu=swiglu), dtype)
    if kind is not None:
        gate_up, down = of_zeros(kind, 8 * 768, 256), of_zeros(kind, 8 * 256, 384)
        weights = replace(weights, gate_up=gate_up, down=down)
    with compiling(capability, tmp_path) as compiled:
        for num_rows in (1, 2, 16, 100):
            chosen = torch.zeros(num_rows, 3, dtype=torch.int64)
            experts(torch.zeros(num_rows, 256, dtype=dtype), weights, chosen, chosen.float())
    kernels = different(compiled)
    assert sorted(kernel.metadata.name for kernel in kernels) == ["_add", "_down", "_gate_up"]
    for kernel in kernels:
        if kernel.metadata.name != "_add":
            assert not loads_that_loops_wait_for(kernel.asm["ptx"])
            # In fp32 tensor cores would round to tf32.
            assert ("mma" in kernel.asm["ptx"]) == (dtype == torch.bfloat16)


def test_low_ranks_compile(capability: int, tmp_path: Path) -> None:
    """The same kernels serve any number of rows and any linear of a model whose numbers are
    multiples of 16, and compute on tensor cores."""
    with compiling(capability, tmp_path) as compiled:
        options = (1, 2, 16, 64), (1024, 4096), (0, 7)
        for num_rows, num_outputs, linear in itertools.product(*options):
            x, y = torch.zeros(num_rows, 2048).bfloat16(), torch.zeros(num_rows, num_outputs)
            tables = torch.zeros(num_rows, dtype=torch.int64)
            OPS.add_low_rank(y.bfloat16(), x, tables, linear, 192)
    kernels = different(compiled)
    assert [kernel.metadata.name for kernel in kernels] == ["_shrink", "_expand"]
    assert all("mma" in kernel.asm["ptx"] for kernel in kernels)


def of_zeros(kind: Kind, n: int, k: int) -> GroupedWeight:
    zeros = {name: torch.zeros_like(t, device="cpu") for name, t in like(kind, n, k).items()}
    return GroupedWeight(kind, k, **zeros)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("int4-128", torch.bfloat16),
        ("fp8-128", torch.bfloat16),
        pytest.param("int8", torch.bfloat16, marks=FULL),
        pytest.param("int4-32", torch.bfloat16, marks=FULL),
        pytest.param("int4-64", torch.float16, marks=FULL),
        pytest.param("int8-16", torch.bfloat16, marks=FULL),
    ],
)
def test_quantized_linears_compile(
    capability: int, tmp_path: Path, kind: Kind, dtype: torch.dtype
) -> None:
    """Codes and scales are copied asynchronously, and unpacked in registers for tensor cores."""
    weight = of_zeros(kind, 4096, 4096)
    with compiling(capability, tmp_path) as compiled:
        for num_rows in LINEAR_ROWS:
            OPS.linear(torch.zeros(num_rows, 4096, dtype=dtype), weight)
    kernels = different(compiled)
    names = [kernel.metadata.name for kernel in kernels]
    assert sorted(names) == ["_add", "_multiply", "_multiply", "_unpack"]
    for kernel in kernels:
        if kernel.metadata.name == "_multiply":
            assert not loads_that_loops_wait_for(kernel.asm["ptx"])
            assert re.search(r"\b(mma|wgmma|tcgen05)\.", kernel.asm["ptx"])


@pytest.mark.parametrize("capability", [89, 90, pytest.param(100, marks=FULL)])
def test_linears_in_fp8_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: int
) -> None:
    """By PyTorch where an output has one scale, and by Triton for blocks. Its scales are needed
    after a product only, so they are loaded beside it."""
    monkeypatch.setattr(linears, "has_fp8", lambda device: True)
    with compiling(capability, tmp_path) as compiled:
        for kind, num_rows in itertools.product(("fp8", "fp8-128"), (17, 18, 100, 300, 301)):
            weight = of_zeros(kind, 4096, 4096)  # type: ignore[arg-type]
            OPS.linear(torch.zeros(num_rows, 4096).bfloat16(), weight)
    kernels = different(compiled)
    names = [kernel.metadata.name for kernel in kernels]
    assert sorted(names) == ["_add", "_multiply", "_multiply", "_round", "_round"]
    for kernel in kernels:
        if kernel.metadata.name == "_multiply":
            assert loads_that_loops_wait_for(kernel.asm["ptx"]) == {"ld.global.b32"}
            assert re.search(r"mma\S*e4m3|tcgen05.mma\S*f8f6f4", kernel.asm["ptx"])


def test_quantized_linears_do_not_depend_on_the_number_of_rows(tmp_path: Path) -> None:
    """A worker compiles, before it serves, what it needs for any number of rows."""
    weight, bias = of_zeros("int4-128", 6144, 4096), torch.zeros(6144).bfloat16()
    with compiling(90, tmp_path) as compiled:
        for num_rows in (*LINEAR_ROWS, 2, 8, 15, 16, 32, 33, 64, 100, 256, 300):
            OPS.linear(torch.zeros(num_rows, 4096).bfloat16(), weight, bias)
            if num_rows == LINEAR_ROWS[-1]:
                warm = set(map(id, compiled))
    assert set(map(id, compiled)) == warm


def test_all_other_kernels_compile(capability: int, tmp_path: Path) -> None:
    x, weight = torch.zeros(4, 96).bfloat16(), torch.zeros(96).bfloat16()
    q, k, angles = x.view(4, 6, 16).clone(), x.view(4, 6, 16).clone(), torch.zeros(4, 8)
    arena = torch.zeros(4, 2, 2, 16, 6, 16).bfloat16()
    norms = HeadNorms(weight[:16], weight[:16], 1e-6)
    with compiling(capability, tmp_path) as compiled:
        OPS.store_kv(arena[:, 0], q, k, torch.arange(4))
        OPS.rms_norm(x, weight, 1e-6)
        OPS.add_rms_norm(x, x.clone(), weight, 1e-6)
        OPS.store_heads(arena[:, 0], q, k, k, torch.arange(4), norms, (angles, angles))
        OPS.silu_mul(x, x)
    names = ["_store_heads", "_rms_norm", "_rms_norm", "_store_heads", "_activate_mul"]
    assert [kernel.metadata.name for kernel in compiled] == names


def test_steps_of_every_batch_size_run_what_warm_up_compiled(tmp_path: Path) -> None:
    """Up to 256 rows: decode steps with and without splits, a kernel that combines splits, and
    prefill steps of up to 16 and up to 256 rows. Index tensors may be parts of larger buffers."""
    arena = torch.zeros(4, 2, 2, 16, 2, 64, dtype=torch.bfloat16)
    tables = torch.zeros(257, 41, dtype=torch.int32)
    indices = torch.ones(300, dtype=torch.int32)
    with compiling(90, tmp_path) as compiled:
        OPS.warm_up(arena[:, 1], AttentionShape(8, 2, 64, 16, arena.dtype, arena.dtype), 256)
        warm = set(map(id, compiled))
        for num_rows in range(1, 257):
            for longest, num_blocks, window in (
                (1, 1, None),
                (1, 32, None),
                (1, 41, 50),
                (3, 8, 7),
            ):
                OPS.paged_attention(
                    torch.zeros(num_rows * longest, 8, 64, dtype=torch.bfloat16),
                    arena[:, 1],
                    tables[1 : num_rows + 1, :num_blocks],
                    indices[num_rows % 3 :][: num_rows + 1],
                    indices[1 : num_rows + 1],
                    1.0,
                    window,
                    max_query_len=longest,
                )
    assert len(warm) == 5
    assert set(map(id, compiled)) == warm


def test_partial_results_of_few_heads_take_the_same_kernels(tmp_path: Path) -> None:
    """With 2 heads, 3 splits and an odd number of rows, sums do not begin at a multiple of 16."""
    arena = torch.zeros(4, 2, 2, 16, 2, 64, dtype=torch.bfloat16)
    with compiling(90, tmp_path) as compiled:
        for num_rows in (1, 2, 3, 4):
            OPS.paged_attention(
                torch.zeros(num_rows, 2, 64, dtype=torch.bfloat16),
                arena[:, 1],
                torch.zeros(num_rows, 41, dtype=torch.int32),
                torch.arange(num_rows + 1, dtype=torch.int32),
                torch.ones(num_rows, dtype=torch.int32),
                1.0,
                max_query_len=1,
            )
    assert len(set(map(id, compiled))) == 2


def test_other_kernels_do_not_depend_on_the_number_of_tokens(tmp_path: Path) -> None:
    weight, kv = torch.zeros(96).bfloat16(), torch.zeros(9, 2, 2, 16, 6, 16).bfloat16()
    norms = HeadNorms(weight[:16], weight[:16], 1e-6)
    names: dict[int, str] = {}
    with compiling(90, tmp_path) as compiled:
        for num_tokens in range(1, 257):
            x, angles = torch.zeros(num_tokens, 96).bfloat16(), torch.zeros(num_tokens, 8)
            q, k = x.view(-1, 6, 16).clone(), x.view(-1, 6, 16).clone()
            slots = torch.arange(-1, num_tokens)[1:]  # a part of a larger buffer
            clear_begun_blocks(kv, slots)
            OPS.store_kv(kv[:, 0], q, k, slots)
            OPS.add_rms_norm(x, x.clone(), weight, 1e-6)
            OPS.store_heads(kv[:, 0], q, k, k, slots, norms, (angles, angles))
            OPS.silu_mul(x, x)
        names |= {id(kernel): kernel.metadata.name for kernel in compiled}
    assert sorted(names.values()) == [
        *("_activate_mul", "_clear_begun_blocks", "_rms_norm", "_store_heads", "_store_heads")
    ]
