"""The device that a rank of a worker computes on."""

from dataclasses import dataclass

import torch

import kvops.cuda
from kvops.cuda.vmm import LOST_CODES, DeviceLost, Driver, DriverError
from services.engine.device.threads import use_device
from services.runtime.errors import StartupError


@dataclass(frozen=True, slots=True)
class OpenDevice:
    """A device that this process can use."""

    name: str
    """`cpu`, `cuda:N`, or `memfd:N`, which computes as the CPU does and keeps its pool as a GPU
    does."""
    driver: Driver | None = None
    """The driver that allocates the memory of pools; None if pools are files."""

    @property
    def torch(self) -> torch.device:
        return torch.device(self.name if self.name.startswith("cuda") else "cpu")


def open_device(name: str) -> OpenDevice:
    """Open the device, for this thread. Raises StartupError if PyTorch has no such device."""
    if name == "cpu":
        return OpenDevice(name)
    if name.startswith("cuda"):
        _need_gpu(name)
    try:
        device = OpenDevice(name, kvops.cuda.driver(name))
        use_device(device.torch)
        return device
    except (kvops.BackendUnavailable, DriverError) as error:
        raise StartupError(str(error)) from error


def _need_gpu(name: str) -> None:
    torch_version = f"PyTorch {torch.__version__}"
    if torch.version.cuda is None:
        raise StartupError(f"device {name}: {torch_version} is built without CUDA")
    if not torch.cuda.is_available():
        raise StartupError(f"device {name}: {torch_version} sees no GPU")
    count = torch.cuda.device_count()
    if torch.device(name).index >= count:
        names = ", ".join(
            f"cuda:{number} ({torch.cuda.get_device_name(number)})" for number in range(count)
        )
        raise StartupError(f"device {name}: there is only {names}")


def lost_device(error: BaseException) -> BaseException | None:
    """The error, or one in the group, that shows that the GPU and its memory are lost."""
    if isinstance(error, BaseExceptionGroup):
        return next(filter(None, map(lost_device, error.exceptions)), None)
    is_lost = isinstance(error, DeviceLost) or (
        isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", 0) in LOST_CODES
    )
    return error if is_lost else None
