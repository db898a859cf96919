"""The pool's arena as a tensor: a file of the host's memory, or memory of a GPU, which all workers
of the pool map; or memory of one process."""

import mmap
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, Self

import torch
from torch import Tensor

from kvops import Backend
from kvops.cuda.vmm import SharedMemory
from services.engine.device.threads import use_device
from services.pool.layout import KVDtype, PoolLayout
from services.pool.sizing import format_size
from services.runtime.errors import StartupError

DTYPES: dict[KVDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


class Arena(Protocol):
    """Mapped bytes. They stay mapped while a view of them exists."""

    def tensor(self) -> Tensor:
        """All bytes, uint8; there may be more than the pool's blocks take."""
        ...

    def close(self) -> None:
        """Give up the mapping. May be called again."""
        ...


class FileArena:
    """A file that all workers of the host map."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        """Map the file. Raises ValueError for a wrong size: mapping would extend a shorter file."""
        if path.stat().st_size != num_bytes:
            raise ValueError(f"{path} has {path.stat().st_size} bytes instead of {num_bytes}")
        self._bytes: Tensor | None = torch.from_file(
            str(path), shared=True, size=num_bytes, dtype=torch.uint8
        )

    def tensor(self) -> Tensor:
        assert self._bytes is not None
        return self._bytes

    def close(self) -> None:
        self._bytes = None


CudaArena = SharedMemory
"""One allocation of a GPU that all workers on it map."""


class KVPool:
    """The blocks `[num_blocks, *layout.block_shape]` of an arena, writable."""

    def __init__(self, arena: Arena, layout: PoolLayout, num_blocks: int) -> None:
        self._arena: Arena | None = arena
        values = arena.tensor()[: num_blocks * layout.block_bytes].view(DTYPES[layout.dtype])
        self._kv: Tensor | None = values.view(num_blocks, *layout.block_shape)

    @classmethod
    def private(cls, layout: PoolLayout, num_blocks: int, device: str) -> Self:
        """Blocks of zeros that no other process sees, in one allocation on `device` ("cuda:0" or
        "cpu"). Raises StartupError if there is no such device or it has too little memory."""
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise StartupError(f"no pool on {device}: PyTorch {torch.__version__} sees no GPU")
        pool = cls.__new__(cls)
        pool._arena = None
        shape, dtype = (num_blocks, *layout.block_shape), DTYPES[layout.dtype]
        num_bytes = num_blocks * layout.block_bytes
        try:
            if device == "cpu":  # the kernel gives zeroed pages when they are first written
                memory = mmap.mmap(-1, num_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                pool._kv = torch.frombuffer(memory, dtype=dtype).view(shape)
            else:
                pool._kv = torch.zeros(shape, dtype=dtype, device=device)
        except (RuntimeError, OSError, OverflowError) as error:
            raise StartupError(
                f"cannot have {format_size(num_bytes)} on {device}: {error}"
            ) from error
        return pool

    @property
    def kv(self) -> Tensor:
        """The arena's tensor, all blocks. Raises RuntimeError after `close`."""
        if self._kv is None:
            raise RuntimeError("the pool is closed")
        return self._kv

    def copy_from(self, source: "KVPool", ops: Backend, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks from another arena of the same layout. A pair is (its block, our block)."""
        for pool in (self, source):
            use_device(pool.kv.device)
        ops.copy_blocks(self.kv, torch.tensor(pairs, dtype=torch.int64).view(-1, 2), source.kv)

    def wait_until_idle(self) -> None:
        """Wait until the GPU has done all that this process has launched. Raises RuntimeError if
        the GPU reports an error."""
        if self._kv is not None and self._kv.is_cuda:
            torch.cuda.synchronize(self._kv.device)

    def close(self) -> None:
        """Drop the tensor: its memory is freed once no view of `kv` is left. May be repeated."""
        self._kv = None
        if self._arena is not None:
            self._arena.close()
