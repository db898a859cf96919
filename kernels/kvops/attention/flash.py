"""Attention by PyTorch's own FlashAttention; the Triton backend has all other operations.

The kernels read the arena directly: one layer's keys, `kv_layer[:, 0]`, are a paged cache
`[num_blocks, page, K, D]` with a block's stride. They need block sizes that are multiples of 256,
and bf16 or fp16. They multiply positions that a query does not see by zero instead of skipping
them, so these positions must be finite: `clear_begun_blocks`.
"""

from inspect import signature

import torch
from torch import Tensor

from kvops.step import AttentionCall, AttentionShape
from kvops.triton import TritonKernels, fusions

PAGE = 256


class FlashKernels(TritonKernels):
    """Attention of PyTorch's FlashAttention."""

    name = "flash"
    has_cap = False
    """Whether these kernels have soft caps."""
    reads_whole_blocks = True
    kv_dtypes = ()
    has_sinks = False

    def __init__(self) -> None:
        """Raises ValueError if this PyTorch has no paged attention."""
        from torch.nn.attention.varlen import varlen_attn

        if "block_table" not in signature(varlen_attn).parameters:
            raise ValueError(
                "attention 'flash' needs PyTorch 2.13 or later, or the package flash-attn; this is "
                f"PyTorch {torch.__version__}"
            )
        self._attend = varlen_attn
        self._capacities: dict[tuple[int, int, torch.device], Tensor] = {}

    def check_attention(self, shape: AttentionShape) -> None:
        if shape.block_size % PAGE:
            raise ValueError(
                f"attention 'flash' needs a block size that is a multiple of {PAGE}, this pool has "
                f"{shape.block_size}: choose --block-size {PAGE}, or --attention triton"
            )
        if shape.head_dim % 8 or shape.head_dim > 256:
            raise ValueError(
                f"attention 'flash' has no kernels for head size {shape.head_dim}: 8, 16 .. 256"
            )
        if shape.cap is not None and not self.has_cap:
            raise ValueError(
                "attention 'flash' has no soft cap of the scores, which this model needs, without "
                "the package flash-attn: choose --attention triton"
            )
        if shape.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(f"attention 'flash' computes in bf16 and fp16, not in {shape.dtype}")

    def warm_up(self, kv_layer: Tensor, shape: AttentionShape, max_rows: int) -> None:
        """Nothing: the kernels are compiled already."""

    def clear_begun_blocks(self, kv: Tensor, slot_mapping: Tensor) -> None:
        fusions.clear_begun_blocks(kv, slot_mapping)

    def paged_attention(self, call: AttentionCall) -> Tensor:
        """Raises ValueError as `check_attention` does."""
        self.check_attention(AttentionShape.of_call(call))
        q, longest = call.q, call.longest_context
        keys, values = call.kv_layer.unbind(dim=1)
        out = self._attend(
            q,
            keys,
            values,
            call.cu_query_lens.int(),
            self._capacity(len(call.context_lens), longest, q.device),
            # The launch has a program for each tile of `max_q` tokens in each row.
            call.max_query_len,
            longest,
            scale=call.scale,
            window_size=_reach(call),
            enable_gqa=q.shape[1] != keys.shape[2],
            seqused_k=call.context_lens.int(),
            block_table=call.block_tables.int().contiguous(),
        )
        assert isinstance(out, Tensor)
        return out

    def _capacity(self, num_rows: int, longest: int, device: torch.device) -> Tensor:
        """Where each row's keys would begin if all had the longest; the lengths are
        `seqused_k`'s."""
        key = (num_rows, longest, device)
        if key not in self._capacities:
            begins = torch.arange(num_rows + 1, dtype=torch.int64, device=device) * longest
            self._capacities[key] = begins.clamp(max=2**31 - 1).int()
        return self._capacities[key]


def _reach(call: AttentionCall) -> tuple[int, int]:
    """How many positions a query sees on either side, -1: all. The one query of a row in a decode
    step sees all positions there are; only if no side is limited, the kernels split its context and
    take the heads of a group together."""
    if call.window is None:
        return (-1, -1) if call.is_decode else (-1, 0)
    return call.window - 1, 0
