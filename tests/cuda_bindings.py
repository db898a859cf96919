"""The module cuda.bindings.driver as if it had a GPU: its own types and signatures, with a memfd
for memory.

A call that the package does not have, or that gets another number of arguments, fails as on a GPU.
Kernels do not run.
"""

import mmap
import os
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from cuda.bindings import driver as real

UUID = bytes(range(16))
NAME = "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"

_NO_VALUE = ("cuInit", "cuMemMap", "cuMemSetAccess", "cuMemsetD8", "cuEventSynchronize")
"""Functions whose answer is the error alone."""


class CudaWithoutGpu:
    """`fails`: the error number that a call gives. `attributes`: attributes of the device; 1 if not
    named; also `IMEX`, whether fabric handles may be made, the `IMEX_ERROR` otherwise, and
    `PROTECTS`, whether memory may be mapped to read only. `calls`: how often each function was
    called."""

    def __init__(self, **attributes: int) -> None:
        self.fails: dict[str, int] = {}
        self.calls: Counter[str] = Counter()
        self.attributes = attributes
        self.properties: list[Any] = []
        self.requested: list[int] = []
        self.handles: set[int] = set()
        self.reserved: dict[int, mmap.mmap] = {}
        self.mapped: dict[int, int] = {}
        self.accessible: set[int] = set()
        self.read_only: set[int] = set()
        self.queued: list[tuple[int, int, int]] = []
        self.events = 0

    def __getattr__(self, name: str) -> Any:
        found = getattr(real, name)
        if not name.startswith("cu"):
            return found
        do = getattr(type(self), f"_{name}")
        num_arguments = _num_arguments(found)

        def call(*arguments: Any) -> tuple[Any, ...]:
            assert len(arguments) == num_arguments, f"{name} takes {found.__doc__}"
            self.calls[name] += 1
            if code := self.fails.get(name):
                return (real.CUresult(code),) if name in _NO_VALUE else (real.CUresult(code), None)
            values = do(self, *arguments)
            if isinstance(values, real.CUresult):
                return (values,) if name in _NO_VALUE else (values, None)
            return (real.CUresult.CUDA_SUCCESS, *values)

        return call

    def _cuInit(self, flags: int) -> tuple[()]:
        return ()

    def _cuDeviceGet(self, number: int) -> Any:
        return (real.CUdevice(number),) if number < 2 else real.CUresult(101)

    def _cuDeviceGetCount(self) -> tuple[int]:
        return (2,)

    def _cuStreamCreate(self, flags: int) -> tuple[int]:
        assert flags == int(real.CUstream_flags.CU_STREAM_NON_BLOCKING)
        return (7,)

    def _cuMemcpyDtoDAsync(self, target: int, source: int, size: int, stream: int) -> tuple[()]:
        assert target in self.accessible - self.read_only
        assert source in self.accessible
        self.queued.append((target, source, size))
        return ()

    def _cuEventCreate(self, flags: int) -> tuple[int]:
        self.events += 1
        return (self.events,)

    def _cuEventRecord(self, event: int, stream: int) -> tuple[()]:
        return ()

    def _cuEventQuery(self, event: int) -> Any:
        return real.CUresult(600) if self.queued else ()

    def _cuEventSynchronize(self, event: int) -> tuple[()]:
        return ()

    def _cuEventDestroy(self, event: int) -> tuple[()]:
        self.events -= 1
        return ()

    def copy_queued(self) -> None:
        """Executes the copies of the stream."""
        for target, source, size in self.queued:
            os.pwrite(self.mapped[target], os.pread(self.mapped[source], size, 0), 0)
        self.queued.clear()

    def _cuDevicePrimaryCtxRetain(self, device: Any) -> tuple[Any]:
        return (real.CUcontext(0),)

    def _cuCtxSetCurrent(self, context: Any) -> tuple[()]:
        return ()

    def _cuCtxSynchronize(self) -> tuple[()]:
        return ()

    def _cuDeviceGetAttribute(self, attribute: Any, device: Any) -> tuple[int]:
        names = real.CUdevice_attribute
        known = {
            int(getattr(names, f"CU_DEVICE_ATTRIBUTE_{name}")): value
            for name, value in self.attributes.items()
            if name not in ("IMEX", "IMEX_ERROR", "PROTECTS")
        }
        return (known.get(int(attribute), 1),)

    def _cuDeviceGetUuid(self, device: Any) -> tuple[Any]:
        return (SimpleNamespace(bytes=UUID),)

    def _cuMemGetInfo(self) -> tuple[int, int]:
        return 60 << 30, 80 << 30

    def _cuMemGetAllocationGranularity(self, properties: Any, option: Any) -> tuple[int]:
        assert isinstance(option, real.CUmemAllocationGranularity_flags)
        return (2 << 20,)

    def _cuMemCreate(self, num_bytes: int, properties: Any, flags: int) -> Any:
        # The getter refuses a number that is no member of the enumeration.
        requested = int(re.search(r"not valid|^(\d+)", _requested(properties)).group(1))  # type: ignore[union-attr]
        if requested & 8 and not self.attributes.get("IMEX", 1):
            return real.CUresult(self.attributes.get("IMEX_ERROR", 800))
        self.requested.append(requested)
        self.properties.append(properties)
        fd = os.memfd_create("gpu")
        os.ftruncate(fd, num_bytes)
        os.pwrite(fd, b"rubbish", 0)
        self.handles.add(fd)
        return (fd,)

    def _cuMemExportToShareableHandle(self, handle: int, kind: Any, flags: int) -> tuple[int]:
        assert handle in self.handles
        assert kind.name == "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
        return (os.dup(handle),)

    def _cuMemImportFromShareableHandle(self, fd: int, kind: Any) -> tuple[int]:
        assert kind.name == "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR"
        handle = os.dup(fd)
        self.handles.add(handle)
        return (handle,)

    def _cuMemAddressReserve(self, size: int, align: int, address: int, flags: int) -> tuple[Any]:
        space = mmap.mmap(-1, size)
        pointer = torch.frombuffer(space, dtype=torch.uint8).data_ptr()
        self.reserved[pointer] = space
        return (real.CUdeviceptr(pointer),)

    def _cuMemMap(self, pointer: Any, size: int, offset: int, handle: int, flags: int) -> tuple[()]:
        assert handle in self.handles
        assert size == len(self.reserved[int(pointer)]) == os.fstat(handle).st_size
        self.mapped[int(pointer)] = os.dup(handle)
        return ()

    def _cuMemSetAccess(self, pointer: Any, size: int, access: Any, count: int) -> Any:
        (flags,) = (one.flags.name.removeprefix("CU_MEM_ACCESS_FLAGS_PROT_") for one in access)
        assert flags in ("READ", "READWRITE")
        if flags == "READ" and not self.attributes.get("PROTECTS", 1):
            return real.CUresult(801)
        if flags == "READ":
            self.read_only.add(int(pointer))
        assert count == 1
        self.accessible.add(int(pointer))
        return ()

    def _cuMemsetD8(self, pointer: Any, value: int, count: int) -> tuple[()]:
        assert int(pointer) in self.accessible - self.read_only
        os.pwrite(self.mapped[int(pointer)], bytes([value]) * count, 0)
        return ()

    def _cuMemUnmap(self, pointer: Any, size: int) -> tuple[()]:
        self.accessible.discard(int(pointer))
        self.read_only.discard(int(pointer))
        os.close(self.mapped.pop(int(pointer)))
        return ()

    def _cuMemAddressFree(self, pointer: Any, size: int) -> tuple[()]:
        assert int(pointer) not in self.mapped
        del self.reserved[int(pointer)]
        return ()

    def _cuMemRelease(self, handle: int) -> tuple[()]:
        self.handles.remove(handle)
        os.close(handle)
        return ()


def _num_arguments(function: Any) -> int:
    signature = function.__doc__.splitlines()[0]
    inside = re.sub(r"\[[^\]]*\]", "", signature.partition("(")[2].rpartition(")")[0])
    return len([argument for argument in inside.split(",") if argument.strip()])


def _requested(properties: Any) -> str:
    try:
        return str(int(properties.requestedHandleTypes))
    except ValueError as error:
        return str(error)
