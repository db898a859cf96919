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


class NvmlProcesses:
    """The driver's list, by nvidia-ml-py. It loads the driver's library when it is first used."""

    def __init__(self) -> None:
        self._is_initialized = False

    def pids(self, gpu_uuid: str) -> frozenset[int]:
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


class MappedProcesses:
    """Lists the processes that map the memory of a device memfd:N (`kvops.cuda.memfd`)."""

    def pids(self, gpu_uuid: str) -> frozenset[int]:
        name = f"memfd:quire-{gpu_uuid} "
        return frozenset(
            int(process.name)
            for process in Path("/proc").iterdir()
            if process.name.isdecimal() and name in _maps(process)
        )


class AllProcesses:
    """Lists by the kind of the device, which its UUID shows."""

    def __init__(self) -> None:
        self._lists: dict[bool, GpuProcesses] = {False: NvmlProcesses(), True: MappedProcesses()}

    def pids(self, gpu_uuid: str) -> frozenset[int]:
        return self._lists[gpu_uuid.startswith("MEMFD-")].pids(gpu_uuid)


def _maps(process: Path) -> str:
    try:
        return (process / "maps").read_text()
    except OSError:  # it has ended, or is another user's
        return ""
