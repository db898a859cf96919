"""Memory of the host behind the interface of a GPU's driver: real descriptors, no GPU. For tests of
all that is around a pool on a GPU; a worker uses it only if its device is set to memfd:N."""

import ctypes
import mmap
import os
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

_TOTAL_BYTES = 1 << 40


class MemfdDriver:
    """A device without a GPU. A handle is a descriptor of a memfd, whose name shows in the maps of
    every process that maps it. A page of another one shows that a process uses the device, as a
    CUDA context does."""

    def __init__(self, number: int) -> None:
        self.uuid = f"MEMFD-{number}"
        self._mappings: dict[int, mmap.mmap] = {}
        page = self.create(mmap.PAGESIZE)
        self._context = mmap.mmap(page, mmap.PAGESIZE)
        os.close(page)

    def free_and_total_bytes(self) -> tuple[int, int]:
        return _TOTAL_BYTES, _TOTAL_BYTES

    def granularity(self) -> int:
        return 2 << 20

    def create(self, num_bytes: int) -> int:
        fd = os.memfd_create(f"quire-{self.uuid}", os.MFD_CLOEXEC)
        os.ftruncate(fd, num_bytes)
        return fd

    def export_fd(self, handle: int) -> int:
        return os.dup(handle)

    def import_fd(self, fd: int) -> int:
        return os.dup(fd)

    def map(self, handle: int, num_bytes: int, writable: bool) -> int:
        allowed = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapping = mmap.mmap(handle, num_bytes, prot=allowed)
        pointer = int(np.frombuffer(mapping, dtype=np.uint8).ctypes.data)
        self._mappings[pointer] = mapping
        return pointer

    def zero(self, pointer: int, num_bytes: int) -> None:
        """A new memfd is zero; writing zeros would only allocate all of its pages."""

    def unmap(self, pointer: int, num_bytes: int) -> None:
        """The pages are unmapped once no tensor refers to them either."""
        del self._mappings[pointer]

    def release(self, handle: int) -> None:
        os.close(handle)

    def copies(self) -> "MemfdDriver":
        return self

    def copy(self, target: int, source: int, num_bytes: int) -> None:
        ctypes.memmove(target, source, num_bytes)

    def mark(self) -> Callable[[], bool]:
        return lambda: True

    def tensor(self, pointer: int, num_bytes: int, owner: object) -> Tensor:
        mapping = self._mappings[pointer]
        if not memoryview(mapping).readonly:
            return torch.frombuffer(mapping, dtype=torch.uint8)
        # PyTorch knows no tensors to be read only: these bytes look writable, and are not.
        pages = (ctypes.c_uint8 * num_bytes).from_address(pointer)
        pages.mapping = mapping  # type: ignore[attr-defined]  # kept while a view exists
        return torch.frombuffer(pages, dtype=torch.uint8)
