"""The KV of a pool's blocks as bytes of the host, for one thread of a file cache."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kvops.copying import CopyStream, CudaStream
from services.engine.device.threads import use_device


class PoolBlocks(Protocol):
    """The blocks of a pool, as one thread reads and fills them."""

    def content(self, block_id: int) -> memoryview:
        """The bytes of a block, until the next call."""
        ...

    def fill(self, block_id: int, read: Callable[[memoryview], bool]) -> bool:
        """Let `read` write the bytes of a block, and return its answer: whether it has. When this
        method returns, the pool has them."""
        ...


class HostBlocks:
    """Blocks `kv` in the host's memory, where files are read and written directly."""

    def __init__(self, kv: Tensor) -> None:
        self._rows = kv.view(torch.uint8).view(len(kv), -1).numpy()

    def content(self, block_id: int) -> memoryview:
        return memoryview(self._rows[block_id])

    def fill(self, block_id: int, read: Callable[[memoryview], bool]) -> bool:
        return read(self.content(block_id))


class GpuBlocks:
    """Blocks `kv` on a GPU. A page-locked buffer has the bytes of one of them."""

    def __init__(self, kv: Tensor, stream: CopyStream) -> None:
        self._kv, self._stream = kv, stream
        self._buffer = stream.buffer(tuple(kv.shape[1:]), kv.dtype)
        self._bytes = self._buffer.view(-1).view(torch.uint8).numpy().data

    def content(self, block_id: int) -> memoryview:
        self._copy(self._buffer, self._kv[block_id])
        return self._bytes

    def fill(self, block_id: int, read: Callable[[memoryview], bool]) -> bool:
        if not read(self._bytes):
            return False
        self._copy(self._kv[block_id], self._buffer)
        return True

    def _copy(self, target: Tensor, source: Tensor) -> None:
        self._stream.copy(target, source)
        self._stream.mark()()


def pool_blocks(kv: Tensor) -> PoolBlocks:
    """The blocks of a pool, for one thread."""
    if not kv.is_cuda:
        return HostBlocks(kv)
    use_device(kv.device)
    return GpuBlocks(kv, CudaStream())
