"""One allocation of device memory that several processes map, each through a file descriptor.

    creator   create ─ map ─ zero ─ export ──▶ fd ──▶ keeper, other workers
    others                          import ◀── fd
                                    map

The memory lives until the last mapping is gone and the last descriptor is closed, so it outlives
the process that created it. (An allocation that is shared by cudaIpc ends with its creator.)
"""

import os
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol

from torch import Tensor


class DriverError(Exception):
    """A call of the driver failed; the text names the call and the driver's error."""


class DeviceLost(DriverError):
    """The device is gone, or its memory is damaged: nothing that it held can be used."""


LOST_CODES = frozenset({46, 214, 220, 226})
"""CUDA's errors after which the memory's content is lost: device unavailable, uncorrectable ECC
error, uncorrectable NVLink error, contained error. Driver and runtime use the same numbers."""


class CopyQueue(Protocol):
    """Copies that a device executes in order, beside its kernels. Any thread may call it, one at a
    time. Methods raise DriverError."""

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        """Queue a copy between mapped memory; the source may be another device's."""
        ...

    def mark(self) -> Callable[[], bool]:
        """Returns a function that says whether all copies queued so far are done, and raises
        DriverError if one has failed. It is called until it says so."""
        ...


class Driver(Protocol):
    """The virtual memory management of one device. Handles and pointers are the driver's own.

    Methods raise DriverError. `uuid` is the device's, as NVML spells it.
    """

    @property
    def uuid(self) -> str: ...

    def free_and_total_bytes(self) -> tuple[int, int]: ...

    def granularity(self) -> int:
        """Sizes of allocations are multiples of this."""
        ...

    def create(self, num_bytes: int) -> Any:
        """Allocate shareable memory with any content; returns its handle."""
        ...

    def export_fd(self, handle: Any) -> int: ...

    def import_fd(self, fd: int) -> Any:
        """Returns a handle. The caller keeps `fd`."""
        ...

    def map(self, handle: Any, num_bytes: int, writable: bool) -> int:
        """Map all of the memory for this device, to read or also to write; returns the pointer. It
        may be another device's memory, if this one can reach it. A driver that cannot protect
        memory from writes maps it to write, too."""
        ...

    def zero(self, pointer: int, num_bytes: int) -> None:
        """Returns when the memory is zero."""
        ...

    def unmap(self, pointer: int, num_bytes: int) -> None: ...

    def release(self, handle: Any) -> None:
        """Give the handle up. A mapping keeps the memory."""
        ...

    def tensor(self, pointer: int, num_bytes: int, owner: object) -> Tensor:
        """The mapped memory as uint8. While the tensor or a view of it exists, so does `owner`."""
        ...

    def copies(self) -> CopyQueue: ...


class SharedMemory:
    """Mapped memory of a device, and the descriptor (`fd`) by which other processes map it.

    The memory is unmapped when this object is closed and no view of `tensor()` is left.
    """

    def __init__(self, driver: Driver, fd: int, num_bytes: int, pointer: int) -> None:
        self.fd = fd
        self.num_bytes = num_bytes
        self._driver = driver
        self._mapping: _Mapping | None = _Mapping(driver, pointer, num_bytes)

    @classmethod
    def create(cls, driver: Driver, num_bytes: int) -> "SharedMemory":
        """New memory of zeros. `num_bytes` is rounded by `allocation_bytes`. Raises DriverError."""
        with ExitStack() as undo:
            handle = driver.create(num_bytes)
            with _released(driver, handle):
                pointer = driver.map(handle, num_bytes, writable=True)
                undo.callback(driver.unmap, pointer, num_bytes)
                driver.zero(pointer, num_bytes)
                fd = driver.export_fd(handle)
            undo.pop_all()
        return cls(driver, fd, num_bytes, pointer)

    @classmethod
    def open(cls, driver: Driver, fd: int, num_bytes: int, writable: bool = True) -> "SharedMemory":
        """Map memory that another process created, and take over `fd`; it is closed if this fails.
        A write into memory that is not `writable` is a fault. DriverError."""
        with ExitStack() as undo:
            undo.callback(os.close, fd)
            handle = driver.import_fd(fd)
            with _released(driver, handle):
                pointer = driver.map(handle, num_bytes, writable)
            undo.pop_all()
        return cls(driver, fd, num_bytes, pointer)

    @property
    def pointer(self) -> int:
        """RuntimeError after `close`."""
        if self._mapping is None:
            raise RuntimeError("the memory is closed")
        return self._mapping.pointer

    def tensor(self) -> Tensor:
        """The memory, [num_bytes] uint8. RuntimeError after `close`."""
        return self._driver.tensor(self.pointer, self.num_bytes, self._mapping)

    def close(self) -> None:
        """Close the descriptor and give up the mapping. May be called again."""
        if self._mapping is not None:
            os.close(self.fd)
            self._mapping = None


class _Mapping:
    """A mapping that ends with its last reference. PyTorch holds one for a tensor that it makes of
    `__cuda_array_interface__`."""

    def __init__(self, driver: Driver, pointer: int, num_bytes: int) -> None:
        self.pointer = pointer
        self.__cuda_array_interface__ = {
            "data": (pointer, False),
            "shape": (num_bytes,),
            "typestr": "|u1",
            "version": 3,
        }
        # Not at the interpreter's end: PyTorch's context is gone by then, and so is the process.
        weakref.finalize(self, driver.unmap, pointer, num_bytes).atexit = False


def allocation_bytes(driver: Driver, num_bytes: int) -> int:
    """`num_bytes`, rounded up to a size that the device allocates."""
    granularity = driver.granularity()
    return -(-num_bytes // granularity) * granularity


def _released(driver: Driver, handle: Any) -> ExitStack:
    stack = ExitStack()
    stack.callback(driver.release, handle)
    return stack
