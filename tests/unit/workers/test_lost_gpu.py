"""A GPU that is lost ends its worker, and marks the pool, which no worker may use any more."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from blockstore.errors import PoolGone, StoreUnavailable
from kvops.cuda.vmm import LOST_CODES, DeviceLost
from services.engine.device.opening import lost_device
from services.pool.directory import PoolDirectory
from services.worker.config import PrefillSettings
from services.worker.liveness.registration import Registration
from services.worker.process import WorkerProcess


def accelerator_error(code: int) -> torch.AcceleratorError:
    """The error as PyTorch raises it, with the runtime's number."""
    error = torch.AcceleratorError("CUDA error")
    error.error_code = code  # type: ignore[attr-defined]
    return error


class Failing(WorkerProcess):
    """`error`: the error with which serving ends."""

    error: Exception

    async def _serve(self, registration: Registration) -> None:
        raise ExceptionGroup("in a task", [StoreUnavailable("away"), self.error])


async def serve(error: Exception, pool: Path) -> None:
    worker = Failing(PrefillSettings.model_construct(), asyncio.Event())
    worker.error = error
    worker._directory = PoolDirectory(pool)
    await worker.serve(cast(Any, None))


@pytest.mark.parametrize("code", sorted(LOST_CODES))
async def test_lost_memory_is_a_pool_that_is_gone(tmp_path: Path, code: int) -> None:
    with pytest.raises(PoolGone, match="the GPU has lost the pool and this worker: CUDA error"):
        await serve(accelerator_error(code), tmp_path)
    assert (tmp_path / "gone").exists()


@pytest.mark.parametrize(
    "error", [accelerator_error(700), accelerator_error(719), RuntimeError("a bug")]
)
async def test_another_error_ends_its_worker_only(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(ExceptionGroup):
        await serve(error, tmp_path)
    assert not (tmp_path / "gone").exists()


def test_the_error_is_found_in_nested_groups() -> None:
    lost = DeviceLost("cuMemMap on cuda:0")
    assert lost_device(ExceptionGroup("a", [ValueError(), ExceptionGroup("b", [lost])])) is lost
    assert lost_device(ValueError()) is None
