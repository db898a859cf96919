"""Attention by the flash-attn package; all other operations are those of the Triton backend.

flash-attn's kernels read the arena directly: one layer's keys, `kv_layer[:, 0]`, are a paged cache
`[num_blocks, page_block_size, K, D]` with a block's stride. The kernels need block sizes that are
multiples of 256, and bf16 or fp16. They multiply positions that a query does not see by zero
instead of skipping them: before a window in version 2, and in the versions for newer GPUs in the
rest of a row's last block too. These positions must be finite: `clear_begun_blocks`.
"""

import torch
from flash_attn import (  # type: ignore[import-not-found]  # installed on GPU machines only
    __version__,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from torch import Tensor

from kvops.triton import TritonKernels, fusions

PAGE = 256


class FlashKernels(TritonKernels):
    name = "flash"
    reads_whole_blocks = True

    def numerics(self) -> dict[str, str]:
        return {**super().numerics(), "flash_attn": __version__}

    def check_layout(self, block_size: int, head_dim: int, dtype: torch.dtype) -> None:
        if block_size % PAGE:
            raise ValueError(
                f"flash-attn needs a block size that is a multiple of {PAGE}, this pool has "
                f"{block_size}: choose --block-size {PAGE}, or the backend 'triton'"
            )
        if head_dim % 8 or head_dim > 256:
            raise ValueError(f"flash-attn has no kernels for head size {head_dim}: 8, 16 .. 256")
        if dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"flash-attn computes in bf16 and fp16, not in {dtype}")

    def warm_up(self, kv_layer: Tensor, num_heads: int, max_rows: int) -> None:
        """Nothing: flash-attn's kernels are compiled when the package is built."""

    def clear_begun_blocks(self, kv: Tensor, slot_mapping: Tensor) -> None:
        fusions.clear_begun_blocks(kv, slot_mapping)

    def paged_attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        block_tables: Tensor,
        cu_query_lens: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int | None,
        max_query_len: int,
    ) -> Tensor:
        """ValueError: see `check_layout`."""
        self.check_layout(kv_layer.shape[2], kv_layer.shape[4], kv_layer.dtype)
        keys, values = kv_layer.unbind(dim=1)
        # Positions seen on either side of a query; `causal` limits the right side to 0 anyway.
        reach = (-1, -1) if window is None else (window - 1, 0)
        tables, lens = block_tables.int().contiguous(), context_lens.int()
        if max_query_len == 1 and len(q) == len(lens):
            out: Tensor = flash_attn_with_kvcache(
                q[:, None],
                keys,
                values,
                cache_seqlens=lens,
                block_table=tables,
                softmax_scale=scale,
                causal=True,
                window_size=reach,
            )
            return out.squeeze(1)
        out = flash_attn_varlen_func(
            q,
            keys,
            values,
            cu_seqlens_q=cu_query_lens.int(),
            cu_seqlens_k=torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0)),
            # The launch has a program for each tile of `max_seqlen_q` tokens in each row.
            max_seqlen_q=max_query_len,
            # An upper bound suffices: the exact lengths are on the device.
            max_seqlen_k=tables.shape[1] * kv_layer.shape[2],
            softmax_scale=scale,
            causal=True,
            window_size=reach,
            block_table=tables,
        )
        return out
