"""Device memory that several processes share. `driver` opens a device by its name, `driver_of` by
its UUID; a driver that cannot run here is an error, never replaced by another one."""

from functools import cache
from importlib import import_module
from types import ModuleType

from kvops.backend import BackendUnavailable
from kvops.cuda.vmm import Driver

__all__ = ["Driver", "driver", "driver_of"]


@cache
def driver(device: str) -> Driver:
    """The driver of "cuda:N", or of "memfd:N": memory of the host in the place of a GPU's, for
    tests. From the first call on, this process is on the device's list of processes. Raises
    BackendUnavailable without cuda-bindings, and DriverError if there is no such GPU."""
    kind, _, number = device.partition(":")
    if kind == "memfd":
        from kvops.cuda.memfd import MemfdDriver

        return MemfdDriver(int(number))
    from kvops.cuda.cuda_driver import CudaDriver

    return CudaDriver(int(number), _bindings(device))


def driver_of(uuid: str) -> Driver:
    """The driver of the device with this UUID; raises errors as `driver` does."""
    if uuid.startswith("MEMFD-"):
        return driver(f"memfd:{uuid.removeprefix('MEMFD-')}")
    from kvops.cuda.cuda_driver import number_of

    return driver(f"cuda:{number_of(uuid, _bindings(uuid))}")


def _bindings(device: str) -> ModuleType:
    try:
        return import_module("cuda.bindings.driver")
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            f"a pool on {device} needs the package cuda-bindings, which is not installed: see the "
            "extra quire-serve[cuda]"
        ) from error
