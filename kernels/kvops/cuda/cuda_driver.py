"""The `Driver` of a CUDA GPU, by cuda-bindings."""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import ModuleType
from typing import Any
from uuid import UUID

import torch
from torch import Tensor

from kvops.cuda.vmm import LOST_CODES, DeviceLost, DriverError

_NOT_READY = 600
"""CUDA_ERROR_NOT_READY: the event has not passed."""

_CANNOT_PROTECT = frozenset({1, 801})
"""CUDA_ERROR_INVALID_VALUE and CUDA_ERROR_NOT_SUPPORTED, the answers to a read-only mapping."""


def number_of(uuid: str, bindings: ModuleType) -> int:
    """Return the number of a device among the devices that this process sees; makes no context.
    Raises DriverError if the device is not there."""
    (error,) = bindings.cuInit(0)
    count = 0 if int(error) else int(bindings.cuDeviceGetCount()[1])
    for number in range(count):
        _, device = bindings.cuDeviceGet(number)
        if _name(bindings.cuDeviceGetUuid(device)[1]) == uuid:
            return number
    raise DriverError(f"{uuid} is none of the {count} GPUs that this process sees")


def _name(uuid: Any) -> str:
    return f"GPU-{UUID(bytes=bytes(uuid.bytes))}"


class _CudaCopies:
    """Copies on a stream of its own; `call` calls the driver in the device's context."""

    def __init__(self, cuda: Any, call: Callable[..., Any]) -> None:
        self._cuda, self._call = cuda, call
        self._stream = call("cuStreamCreate", int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING))

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        self._call("cuMemcpyDtoDAsync", target, source, num_bytes, self._stream)

    def mark(self) -> Callable[[], bool]:
        flags = int(self._cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)
        event = self._call("cuEventCreate", flags)
        self._call("cuEventRecord", event, self._stream)

        def is_done() -> bool:
            if int(self._cuda.cuEventQuery(event)[0]) == _NOT_READY:
                return False
            self._call("cuEventSynchronize", event)  # raises the error, if there is one
            self._call("cuEventDestroy", event)
            return True

        return is_done


class CudaDriver:
    """The device `number` among the devices that this process sees. Any thread may call it: it
    works in the device's primary context, as PyTorch does."""

    def __init__(self, number: int, bindings: ModuleType) -> None:
        """`bindings` is cuda.bindings.driver. Raises DriverError if there is no such device."""
        self._cuda: Any = bindings
        self._number = number
        self._call("cuInit", 0)
        self._device = self._call("cuDeviceGet", number)
        self._context = self._call("cuDevicePrimaryCtxRetain", self._device)
        if not self._has("VIRTUAL_MEMORY_MANAGEMENT"):
            raise DriverError(f"cuda:{number} has no virtual memory management, which pools need")

    @property
    def uuid(self) -> str:
        return _name(self._call("cuDeviceGetUuid", self._device))

    def free_and_total_bytes(self) -> tuple[int, int]:
        free, total = self._in_context("cuMemGetInfo")
        return int(free), int(total)

    def granularity(self) -> int:
        flags = self._cuda.CUmemAllocationGranularity_flags
        wanted = flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self._in_context("cuMemGetAllocationGranularity", self._properties(), wanted))

    def create(self, num_bytes: int) -> Any:
        """Make memory, with a fabric handle where this process may make one: it may not without an
        IMEX channel, even if the device has the attribute."""
        if self._has("HANDLE_TYPE_FABRIC"):
            with suppress(DriverError):
                return self._in_context("cuMemCreate", num_bytes, self._properties(fabric=True), 0)
        return self._in_context("cuMemCreate", num_bytes, self._properties(), 0)

    def export_fd(self, handle: Any) -> int:
        return int(self._call("cuMemExportToShareableHandle", handle, self._fd_type, 0))

    def import_fd(self, fd: int) -> Any:
        return self._in_context("cuMemImportFromShareableHandle", fd, self._fd_type)

    def map(self, handle: Any, num_bytes: int, writable: bool) -> int:
        with ExitStack() as undo:
            pointer = self._in_context("cuMemAddressReserve", num_bytes, 0, 0, 0)
            undo.callback(self._call, "cuMemAddressFree", pointer, num_bytes)
            self._call("cuMemMap", pointer, num_bytes, 0, handle, 0)
            undo.callback(self._call, "cuMemUnmap", pointer, num_bytes)
            self._give_access(pointer, num_bytes, writable)
            undo.pop_all()
        return int(pointer)

    def _give_access(self, pointer: Any, num_bytes: int, writable: bool) -> None:
        """Memory that the driver cannot protect becomes writable; nothing writes it anyway."""
        flags = self._cuda.CUmemAccess_flags
        access, properties = self._cuda.CUmemAccessDesc(), self._properties()
        access.location = properties.location  # a view: `properties` has to stay
        if not writable:
            access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READ
            (error,) = self._cuda.cuMemSetAccess(pointer, num_bytes, [access], 1)
            if int(error) not in _CANNOT_PROTECT:
                self._check("cuMemSetAccess", error)
                return
        access.flags = flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        self._call("cuMemSetAccess", pointer, num_bytes, [access], 1)

    def zero(self, pointer: int, num_bytes: int) -> None:
        self._in_context("cuMemsetD8", pointer, 0, num_bytes)
        self._call("cuCtxSynchronize")

    def unmap(self, pointer: int, num_bytes: int) -> None:
        self._in_context("cuMemUnmap", pointer, num_bytes)
        self._call("cuMemAddressFree", pointer, num_bytes)

    def release(self, handle: Any) -> None:
        self._call("cuMemRelease", handle)

    def tensor(self, pointer: int, num_bytes: int, owner: object) -> Tensor:
        return torch.as_tensor(owner, device=f"cuda:{self._number}")

    def copies(self) -> "_CudaCopies":
        return _CudaCopies(self._cuda, self._in_context)

    @property
    def _fd_type(self) -> Any:
        return self._cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

    def _properties(self, fabric: bool = False) -> Any:
        """The properties of the pool's allocation: on this device, shareable, readable by network
        cards if the device permits that."""
        cuda = self._cuda
        properties = cuda.CUmemAllocationProp()
        properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        properties.location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        properties.location.id = self._number
        fabric_type = cuda.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC
        # A number, since the enumeration has no member for both kinds together.
        properties.requestedHandleTypes = int(self._fd_type) | (int(fabric_type) if fabric else 0)
        properties.allocFlags.gpuDirectRDMACapable = self._has("GPU_DIRECT_RDMA_WITH_CUDA_VMM")
        return properties

    def _has(self, name: str) -> int:
        attributes = self._cuda.CUdevice_attribute
        attribute = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}_SUPPORTED")
        return int(self._call("cuDeviceGetAttribute", attribute, self._device))

    def _in_context(self, name: str, *arguments: Any) -> Any:
        self._call("cuCtxSetCurrent", self._context)
        return self._call(name, *arguments)

    def _call(self, name: str, *arguments: Any) -> Any:
        error, *values = getattr(self._cuda, name)(*arguments)
        self._check(name, error)
        return values[0] if len(values) == 1 else values

    def _check(self, name: str, error: Any) -> None:
        if int(error):
            kind = DeviceLost if int(error) in LOST_CODES else DriverError
            raise kind(f"{name} on cuda:{self._number}: {error.name} ({int(error)})")
