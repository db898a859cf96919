"""The layout of a pool's arena, on which all workers of the pool must agree."""

from dataclasses import dataclass
from math import prod
from typing import Literal

Dtype = Literal["float32", "bfloat16"]

KVDtype = Dtype | Literal["int8", "fp8"]

ITEM_BYTES: dict[KVDtype, int] = {"float32": 4, "bfloat16": 2, "int8": 1, "fp8": 1}

SCALE_BYTES = 4
"""In int8, an fp32 scale follows the values of each head (`kvops.int8_kv`)."""


@dataclass(frozen=True, slots=True)
class PoolLayout:
    """The layout of one model's KV, block-major: a block is `block_bytes` contiguous bytes.

    `dtype` is of keys and values. With several ranks there is an arena for each, with
    `num_kv_heads` heads and `block_bytes` of each block.
    """

    model: str
    fingerprint: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: KVDtype
    block_size: int
    tensor_parallel_size: int = 1

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """The shape of one block: [num_layers, 2 (K, V), block_size, num_kv_heads, head_dim]; in
        int8, a head has SCALE_BYTES more."""
        width = self.head_dim + (SCALE_BYTES if self.dtype == "int8" else 0)
        return self.num_layers, 2, self.block_size, self.num_kv_heads, width

    @property
    def block_bytes(self) -> int:
        return prod(self.block_shape) * ITEM_BYTES[self.dtype]
