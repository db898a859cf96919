"""The layout of a pool's arena, on which all workers of the pool must agree."""

from dataclasses import dataclass
from typing import Literal

Dtype = Literal["float32", "bfloat16"]

ITEM_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """The layout of one model's KV, block-major: a block is `block_bytes` contiguous bytes."""

    model: str
    fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: Dtype
    block_size: int

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """The shape of one block: [num_layers, 2 (K, V), block_size, num_kv_heads, head_dim]."""
        return self.num_layers, 2, self.block_size, self.num_kv_heads, self.head_dim

    @property
    def block_bytes(self) -> int:
        num_values = 2 * self.num_layers * self.block_size * self.num_kv_heads * self.head_dim
        return num_values * ITEM_BYTES[self.dtype]
