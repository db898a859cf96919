"""A GPU as PyTorch and NVML report it, on a machine that has none."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
import torch


def use_gpu(
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    name: str = "NVIDIA X",
    *,
    is_available: bool = True,
    cuda: str | None = "13.0",
) -> None:
    """PyTorch, built with `cuda`, sees a GPU of this capability and name if `is_available`."""
    for place, attribute, value in (
        (torch.version, "cuda", cuda),
        (torch.cuda, "is_available", lambda: is_available),
        (torch.cuda, "get_device_capability", lambda: capability),
        (torch.cuda, "get_device_name", lambda: name),
    ):
        monkeypatch.setattr(place, attribute, value)


def list_processes(
    monkeypatch: pytest.MonkeyPatch, processes: Iterable[Any], mps: Iterable[int] | None = ()
) -> None:
    """NVML lists these processes on each GPU; None for `mps` if it does not support MPS."""

    def of_mps(_device: object) -> list[SimpleNamespace]:
        if mps is None:
            raise pynvml.NVMLError_NotSupported
        return [SimpleNamespace(pid=pid) for pid in mps]

    for name, function in (
        ("nvmlInit", lambda: None),
        ("nvmlDeviceGetHandleByUUID", lambda uuid: uuid),
        ("nvmlDeviceGetComputeRunningProcesses", lambda _device: list(processes)),
        ("nvmlDeviceGetMPSComputeRunningProcesses", of_mps),
    ):
        monkeypatch.setattr(pynvml, name, function)
