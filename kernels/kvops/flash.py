"""Attention by the flash-attn package; all other operations are those of the Triton backend.

flash-attn's kernels read the arena directly: one layer's keys, `kv_layer[:, 0]`, are a paged cache
`[num_blocks, page_block_size, K, D]` with a block's stride. The kernels need block sizes that are
multiples of 256, and bf16 or fp16. They multiply positions outside a window by zero instead of
skipping them: with this backend these positions must be finite, as they are in blocks that a
sequence has filled.
"""

import torch
from flash_attn import (  # type: ignore[import-not-found]  # installed on GPU machines only
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from torch import Tensor

from kvops.triton import TritonKernels

PAGE = 256


class FlashKernels(TritonKernels):
    """The flash backend. ValueError, at the first attention (the engine's warm-up): flash-attn
    cannot read the arena."""

    name = "flash"

    def __init__(self) -> None:
        self._last_step: tuple[Tensor, bool] | None = None

    def paged_attention(
        self,
        q: Tensor,
        kv_layer: Tensor,
        block_tables: Tensor,
        cu_query_lens: Tensor,
        context_lens: Tensor,
        scale: float,
        window: int | None = None,
    ) -> Tensor:
        _check(kv_layer)
        keys, values = kv_layer.unbind(dim=1)
        # Positions seen on either side of a query; `causal` limits the right side to 0 anyway.
        reach = (-1, -1) if window is None else (window - 1, 0)
        tables, lens = block_tables.int().contiguous(), context_lens.int()
        if self._is_decode(cu_query_lens, len(q)):
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
            # Upper bounds suffice: they only size the launch, and the exact lengths are on the
            # device, where reading them would wait for it.
            max_seqlen_q=len(q),
            max_seqlen_k=tables.shape[1] * kv_layer.shape[2],
            softmax_scale=scale,
            causal=True,
            window_size=reach,
            block_table=tables,
        )
        return out

    def _is_decode(self, cu_query_lens: Tensor, num_tokens: int) -> bool:
        """Whether every row has one token. The result is read from the device once a step, not once
        a layer: all layers of a step get the same tensor, and each step has a new one."""
        if num_tokens != len(cu_query_lens) - 1:
            return False
        if self._last_step is None or self._last_step[0] is not cu_query_lens:
            self._last_step = cu_query_lens, bool((cu_query_lens.diff() == 1).all())
        return self._last_step[1]


def _check(kv_layer: Tensor) -> None:
    block_size, _, head_dim = kv_layer.shape[2:]
    if block_size % PAGE:
        raise ValueError(
            f"flash-attn needs a block size that is a multiple of {PAGE}, this pool has "
            f"{block_size}: choose --block-size {PAGE}, or the backend 'triton'"
        )
    if head_dim % 8 or head_dim > 256:
        raise ValueError(f"flash-attn has no kernels for head size {head_dim}: 8, 16 .. 256")
    if kv_layer.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(f"flash-attn computes in bf16 and fp16, not in {kv_layer.dtype}")
