"""The pool's arena as a tensor: one file, mapped by every worker of the host, copied by none."""

from pathlib import Path

import torch

from services.common.pool.layout import Dtype, PoolLayout

DTYPES: dict[Dtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class KVPool:
    """The arena `[num_blocks, num_layers, 2, block_size, num_kv_heads, head_dim]`, shared and
    writable."""

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

    @property
    def kv(self) -> torch.Tensor:
        """All blocks. RuntimeError after `close`."""
        if self._kv is None:
            raise RuntimeError("the pool is closed")
        return self._kv

    def close(self) -> None:
        """Unmap, as soon as nobody holds a view of `kv` any more. Again: no error."""
        self._kv = None
