"""The interface that a device implements. `ops.Backend` checks every argument before; its
docstrings define the operations."""

from typing import Protocol

from torch import Tensor


class Kernels(Protocol):
    name: str

    def store_kv(self, kv_layer: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor) -> None: ...

    def paged_attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        block_tables: Tensor,
        cu_query_lens: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor: ...

    def copy_blocks(self, kv: Tensor, pairs: Tensor, source: Tensor | None) -> None: ...

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor: ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor: ...

    def rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None: ...

    def silu_mul(self, gate: Tensor, up: Tensor) -> Tensor: ...
