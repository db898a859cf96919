"""What the interpreter cannot tell: that Triton's kernels compile for GPUs, fit into their shared
memory, and use tensor cores. Needs no GPU: each launch is compiled for one, and goes no further."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import triton  # type: ignore[import-untyped]
from triton.backends.compiler import GPUTarget  # type: ignore[import-untyped]
from triton.runtime.jit import JITFunction  # type: ignore[import-untyped]

from kvops import Backend
from kvops.triton import TritonKernels

SHARED_BYTES = 99 * 1024
"""Of a block on capabilities 8.6 and 8.9, the least of all since 8.0."""


class Target:
    """As much of Triton's driver as compiling asks for. Compiled kernels are kept by device, so
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
    """Within, launches compile for this capability and do nothing else; the list has what came."""
    compiled: list[Any] = []
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> None:
        compiled.append(run(self, *args, warmup=True, **kwargs))

    with triton.knobs.cache.scope(), pytest.MonkeyPatch.context() as patch:
        triton.knobs.cache.dir = str(cache)
        patch.setattr(triton.runtime.driver, "_active", Target(capability))
        patch.setattr(JITFunction, "run", compile_only)
        yield compiled


@pytest.fixture(params=[80, 90], ids=["sm_80", "sm_90"])
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
    )


@pytest.mark.parametrize("num_tokens", [4, 200], ids=["decode", "prefill"])
@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(128, torch.bfloat16), (256, torch.bfloat16), (64, torch.float32)]
)
def test_attention_compiles(
    capability: int, tmp_path: Path, num_tokens: int, head_dim: int, dtype: torch.dtype
) -> None:
    with compiling(capability, tmp_path) as compiled:
        attend(num_tokens, 4, head_dim, dtype)
    assert [kernel.metadata.name for kernel in compiled] == (
        ["_attend", "_combine"] if num_tokens == 4 else ["_attend"]
    )
    assert all(kernel.metadata.shared <= SHARED_BYTES for kernel in compiled)
    on_tensor_cores = "mma" in compiled[0].asm["ptx"]
    assert on_tensor_cores == (dtype == torch.bfloat16)  # in fp32 they would round to tf32


def test_all_other_kernels_compile(capability: int, tmp_path: Path) -> None:
    x, weight = torch.zeros(4, 96).bfloat16(), torch.zeros(96).bfloat16()
    q, k, angles = x.view(4, 6, 16).clone(), x.view(4, 6, 16).clone(), torch.zeros(4, 8)
    arena = torch.zeros(4, 2, 2, 16, 6, 16).bfloat16()
    with compiling(capability, tmp_path) as compiled:
        OPS.store_kv(arena[:, 0], q, k, torch.arange(4))
        OPS.rms_norm(x, weight, 1e-6)
        OPS.add_rms_norm(x, x.clone(), weight, 1e-6)
        OPS.rope(q, k, angles, angles)
        OPS.silu_mul(x, x)
    names = ["_store_kv", "_rms_norm", "_rms_norm", "_rope", "_silu_mul"]
    assert [kernel.metadata.name for kernel in compiled] == names
