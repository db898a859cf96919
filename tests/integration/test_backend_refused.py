"""A backend that cannot run here ends the worker with the reason, before it joins a pool."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from bench.make_checkpoint import CheckpointSpec, make_checkpoint
from services.runtime.config import load_settings
from services.runtime.errors import StartupError
from services.worker.config import PrefillSettings
from services.worker.liveness.registration import Registration
from services.worker.process import WorkerProcess
from tests.kernels import flash_stand_in

Machine = Callable[[pytest.MonkeyPatch], None]


def without_cuda(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.version, "cuda", None)


def with_gpu(*capability: int) -> Machine:
    def machine(patch: pytest.MonkeyPatch) -> None:
        patch.setitem(sys.modules, "flash_attn", flash_stand_in)
        patch.delitem(sys.modules, "kvops.attention.flash_package", raising=False)
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_name", lambda number=0: "NVIDIA X")
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "set_device", lambda device: None)
        patch.setattr(torch.cuda, "get_device_capability", lambda: capability)

    return machine


def without_bindings(patch: pytest.MonkeyPatch) -> None:
    with_gpu(9, 0)(patch)
    patch.setitem(sys.modules, "cuda.bindings.driver", None)


def with_little_cuda(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch.version, "cuda", "13.0")


REFUSED: dict[str, tuple[Machine, dict[str, str], str]] = {
    "no graph can wait": (
        with_gpu(9, 0),
        {"BACKEND": "triton", "ATTENTION": "reference"},
        "add --enforce-eager",
    ),
    "attention of a CPU": (
        with_gpu(9, 0),
        {"BACKEND": "reference", "ATTENTION": "flash"},
        "attention 'flash' is for the backend 'triton'; 'reference' has attention of its own",
    ),
    "GPU": (with_gpu(9, 0), {"BACKEND": "triton"}, "computes on cuda, and the device is cpu"),
    "device without CUDA": (without_cuda, {"DEVICE": "cuda:0"}, "cuda:0: .* built without CUDA"),
    "no GPU": (with_little_cuda, {"DEVICE": "cuda:0"}, "device cuda:0: PyTorch .* sees no GPU"),
    "GPU too few": (with_gpu(9, 0), {"DEVICE": "cuda:1"}, r"there is only cuda:0 \(NVIDIA X\)"),
    "no cuda-bindings": (without_bindings, {"DEVICE": "cuda:0"}, "the package cuda-bindings"),
    "CPU kernels": (
        lambda patch: None,
        {"DEVICE": "memfd:0", "BACKEND": "triton"},
        "needs a CUDA device",
    ),
    "no size": (
        lambda patch: None,
        {"DEVICE": "memfd:0", "THREADS": "1"},
        "set pool_memory: memfd:0 has",
    ),
    "block size": (
        with_gpu(9, 0),
        {"BACKEND": "triton", "ATTENTION": "flash"},
        "choose --block-size 256",
    ),
    "dtype": (
        with_gpu(9, 0),
        {"BACKEND": "triton", "ATTENTION": "flash", "BLOCK_SIZE": "256", "DTYPE": "float32"},
        "computes in bf16 and fp16",
    ),
}


@pytest.mark.parametrize(("machine", "settings", "reason"), REFUSED.values(), ids=REFUSED.keys())
def test_a_backend_that_cannot_run_here_is_refused_before_the_pool(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    machine: Machine,
    settings: dict[str, str],
    reason: str,
) -> None:
    """The worker has no registration, which every call to the store needs."""
    machine(monkeypatch)
    pools = tmp_path / "pools"
    pools.mkdir()
    environment = {
        "QUIRE_PREFILL_MODEL": str(
            make_checkpoint(tmp_path / "tiny", CheckpointSpec(dtype="bfloat16"))
        ),
        "QUIRE_PREFILL_POOL_ROOT": str(pools),
        **{f"QUIRE_PREFILL_{name}": value for name, value in settings.items()},
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    worker = WorkerProcess(load_settings(PrefillSettings), asyncio.Event())
    with pytest.raises(StartupError, match=reason):
        asyncio.run(worker.serve(cast(Registration, cast(Any, None))))
    assert list(pools.iterdir()) == []
