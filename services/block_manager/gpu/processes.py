"""Lists the processes that use a GPU: by NVML, or for the devices of tests by /proc."""

from contextlib import suppress
from pathlib import Path
from typing import Protocol


class ProcessListError(Exception):
    """The processes of a GPU cannot be listed, so none of them counts as gone."""


class GpuProcesses(Protocol):
    def pids(self, gpu_uuid: str) -> frozenset[int]:
        """Return the processes that use this GPU, as this process numbers them. Raises
        ProcessListError."""
        ...


class AllProcesses:
    """The driver's list, by nvidia-ml-py, which loads the driver's library when it is first used.
    Of a device memfd:N (`kvops.cuda.memfd`), which its UUID shows: the processes that map its
    memory."""

    def __init__(self) -> None:
        self._is_initialized = False

    def pids(self, gpu_uuid: str) -> frozenset[int]:
        if gpu_uuid.startswith("MEMFD-"):
            return _mapping(f"memfd:quire-{gpu_uuid} ")
        try:
            import pynvml
        except ModuleNotFoundError as error:
            raise ProcessListError(
                "nvidia-ml-py is not installed: see the extra quire-serve[nvml]"
            ) from error
        try:
            if not self._is_initialized:
                pynvml.nvmlInit()
                self._is_initialized = True
            device = pynvml.nvmlDeviceGetHandleByUUID(gpu_uuid)
            processes = list(pynvml.nvmlDeviceGetComputeRunningProcesses(device))
            with suppress(pynvml.NVMLError_NotSupported):
                processes += pynvml.nvmlDeviceGetMPSComputeRunningProcesses(device)
        except pynvml.NVMLError as error:
            raise ProcessListError(
                f"NVML cannot list the processes of {gpu_uuid}: {error}"
            ) from error
        return frozenset(process.pid for process in processes)


def _mapping(name: str) -> frozenset[int]:
    """The processes that have mapped memory of this name."""
    processes = (path for path in Path("/proc").iterdir() if path.name.isdecimal())
    return frozenset(int(process.name) for process in processes if name in _maps(process))


def _maps(process: Path) -> str:
    try:
        return (process / "maps").read_text()
    except OSError:  # it has ended, or is another user's
        return ""
