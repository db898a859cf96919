"""Attention 'flash' by the package flash-attn, where it is installed: it has a kernel for decode
steps that splits contexts. It has the same limits as PyTorch's (`kvops.attention.flash`)."""

import torch
from flash_attn import (  # type: ignore[import-not-found]  # installed on GPU machines only
    __version__,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from torch import Tensor

from kvops.attention.flash import FlashKernels
from kvops.step import AttentionCall, AttentionShape


class FlashPackageKernels(FlashKernels):
    has_cap = True

    def __init__(self) -> None:
        """Skips the base class, which needs PyTorch's own attention."""

    def numerics(self) -> dict[str, str]:
        return {**super().numerics(), "flash_attn": __version__}

    def paged_attention(self, call: AttentionCall) -> Tensor:
        """Raises ValueError as `check_attention` does."""
        self.check_attention(AttentionShape.of_call(call))
        keys, values = call.kv_layer.unbind(dim=1)
        # Positions seen on either side of a query; `causal` limits the right side to 0 anyway.
        reach = (-1, -1) if call.window is None else (call.window - 1, 0)
        tables, lens = call.block_tables.int().contiguous(), call.context_lens.int()
        if call.is_decode:
            out: Tensor = flash_attn_with_kvcache(
                call.q[:, None],
                keys,
                values,
                cache_seqlens=lens,
                block_table=tables,
                softmax_scale=call.scale,
                softcap=call.cap or 0.0,
                causal=True,
                window_size=reach,
            )
            return out.squeeze(1)
        out = flash_attn_varlen_func(
            call.q,
            keys,
            values,
            cu_seqlens_q=call.cu_query_lens.int(),
            cu_seqlens_k=torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0)),
            # The launch has a program for each tile of `max_seqlen_q` tokens in each row.
            max_seqlen_q=call.max_query_len,
            # An upper bound suffices: the exact lengths are on the device.
            max_seqlen_k=call.longest_context,
            softmax_scale=call.scale,
            softcap=call.cap or 0.0,
            causal=True,
            window_size=reach,
            block_table=tables,
        )
        return out
