import os
from collections.abc import Iterator

import pytest

import kvops
from kvops import Backend
from kvops.native import NativeCpu, emulated_kernels, usable_kernels


@pytest.fixture(scope="session")
def reference() -> Backend:
    return kvops.backend("reference")


@pytest.fixture(scope="session")
def ops() -> Iterator[Backend]:
    """The backend that is compared with the reference: Triton's in its interpreter, where
    `test_triton.py` runs the tests, and else the native one."""
    if "TRITON_INTERPRET" not in os.environ:
        yield kvops.backend("cpu")
        return
    from .triton_interpreter import compute_bf16_as_a_gpu

    with pytest.MonkeyPatch.context() as patch:
        compute_bf16_as_a_gpu(patch)
        yield kvops.backend("triton")


@pytest.fixture(scope="module", params=[*usable_kernels(), *emulated_kernels()])
def cpu(request: pytest.FixtureRequest) -> NativeCpu:
    """One thread with the kernels of each instruction set."""
    return NativeCpu(1, request.param)
