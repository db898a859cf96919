"""The pool's arena as a tensor: a file that all workers of the host map, or memory of one process.

An arena on a GPU is private to its process for now: sharing it between workers is not implemented,
and no worker uses one. It has run on no GPU yet.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import torch

from kvops import Backend
from services.common.errors import StartupError
from services.common.pool.layout import KVDtype, PoolLayout
from services.common.pool.sizing import format_size

DTYPES: dict[KVDtype, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
}


class KVPool:
    """The arena `[num_blocks, *layout.block_shape]`, writable.

    The constructor maps a shared file; `private` allocates memory of this process.
    """

    def __init__(self, path: Path, layout: PoolLayout, num_blocks: int) -> None:
        """Map the file. ValueError: its size is wrong, and mapping would extend a shorter file."""
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
        """An arena of zeros that no other process sees, in one allocation on `device` ("cuda" or
        "cpu"). Raises StartupError if there is no such device or it has too little memory."""
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
        """The arena's tensor, all blocks. Raises RuntimeError after `close`."""
        if self._kv is None:
            raise RuntimeError("the pool is closed")
        return self._kv

    def copy_from(self, source: "KVPool", ops: Backend, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks from another arena of the same layout. A pair is (its block, our block)."""
        ops.copy_blocks(self.kv, torch.tensor(pairs, dtype=torch.int64).view(-1, 2), source.kv)

    def close(self) -> None:
        """Drop the tensor: its memory is freed once no view of `kv` is left. May be repeated."""
        self._kv = None
