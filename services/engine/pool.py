"""The pool's arena as a tensor: a file that every worker of the host maps, or one process's own
memory on a device.

A GPU's arena is of the second kind for now: another process cannot open it, which will need CUDA
IPC. So what runs there prefills and decodes in one process.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch

from kvops import Backend
from services.common.errors import StartupError
from services.common.pool.layout import Dtype, PoolLayout
from services.common.pool.sizing import format_size

DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KVPool:
    """The arena `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`, writable; mapped
    from a file it is shared, made by `private` it is not."""

    def __init__(self, path: Path, layout: PoolLayout, num_blocks: int) -> None:
        """Map the file. ValueError: it is not of this geometry (mapping would stretch it)."""
        num_bytes = num_blocks * layout.block_bytes
        if path.stat().st_size != num_bytes:
            raise ValueError(f"{path} has {path.stat().st_size} bytes instead of {num_bytes}")
        dtype = DTYPES[layout.dtype]
        values = torch.from_file(
            str(path), shared=True, size=num_bytes // dtype.itemsize, dtype=dtype
        )
        self._kv: torch.Tensor | None = values.view(num_blocks, *layout.block_shape)

    @classmethod
    def private(cls, layout: PoolLayout, num_blocks: int, device: str) -> Self:
        """An arena of zeros that no other process sees, one allocation on `device` ("cuda", "cpu").

        StartupError: no such device, or not this much memory on it.
        """
        if torch.device(device).type == "cuda" and not torch.cuda.is_available():
            raise StartupError(f"no pool on {device}: PyTorch {torch.__version__} sees no GPU")
        pool = cls.__new__(cls)
        try:
            pool._kv = torch.zeros(
                (num_blocks, *layout.block_shape), dtype=DTYPES[layout.dtype], device=device
            )
        except RuntimeError as error:
            wanted = format_size(num_blocks * layout.block_bytes)
            raise StartupError(f"cannot have {wanted} on {device}: {error}") from error
        return pool

    @property
    def kv(self) -> torch.Tensor:
        """All blocks. RuntimeError after `close`."""
        if self._kv is None:
            raise RuntimeError("the pool is closed")
        return self._kv

    def copy_from(self, source: "KVPool", ops: Backend, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of another arena, of the same layout: (its block, ours) each."""
        ops.copy_blocks(self.kv, torch.tensor(pairs, dtype=torch.int64).view(-1, 2), source.kv)

    def close(self) -> None:
        """Let go, as soon as nobody holds a view of `kv` any more. Again: no error."""
        self._kv = None
