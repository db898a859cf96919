"""A stand-in for the package flashinfer 0.7, in PyTorch: the class that Quire uses, with the whole
signatures of the methods that it calls, their documented meaning, and their refusals.

As in the package, `plan` gets lengths on the host, `run` gets none, and in graph mode the buffers
given at construction have what `run` reads: a plan for a graph is seen by the graph.
"""

from typing import Any

import torch
from torch import Tensor

from kvops.reference import ReferenceKernels
from kvops.step import AttentionCall

__version__ = "0.7.2.post1"

MUST_BE_OFF = ("custom_mask", "packed_custom_mask", "prefix_len_ptr")


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,
        paged_kv_indptr_buf: Tensor | None = None,
        paged_kv_indices_buf: Tensor | None = None,
        paged_kv_last_page_len_buf: Tensor | None = None,
        custom_mask_buf: Tensor | None = None,
        mask_indptr_buf: Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        assert float_workspace_buffer.dtype == torch.uint8
        assert float_workspace_buffer.data_ptr() % 16 == 0
        assert kv_layout == "NHD"
        assert backend in ("auto", "fa2")
        assert (custom_mask_buf, mask_indptr_buf, jit_args, jit_kwargs) == (None,) * 4
        assert not variant_owns_mask
        buffers = [
            qo_indptr_buf,
            paged_kv_indptr_buf,
            paged_kv_indices_buf,
            paged_kv_last_page_len_buf,
        ]
        self.in_graph, self.backend, self.plans = use_cuda_graph, backend, 0
        self._workspace_bytes = len(float_workspace_buffer)
        self.buffers = [buffer for buffer in buffers if buffer is not None]
        assert len(self.buffers) == (4 if use_cuda_graph else 0)
        assert all(buffer.dtype == torch.int32 for buffer in self.buffers)

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Tensor | None = None,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: Tensor | None = None,
        token_pos_in_items_ptr: Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Tensor | None = None,
        seq_lens: Tensor | None = None,
        seq_lens_q: Tensor | None = None,
        block_tables: Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
    ) -> None:
        given = locals()
        assert all(given[name] is None for name in MUST_BE_OFF)
        for tensor in (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len):
            assert tensor.dtype == torch.int32
            assert tensor.is_contiguous()
        num_rows = len(qo_indptr) - 1
        assert qo_indptr[0] == paged_kv_indptr[0] == 0
        assert len(paged_kv_indptr) == num_rows + 1
        assert len(paged_kv_last_page_len) == num_rows
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert ((paged_kv_last_page_len > 0) & (paged_kv_last_page_len <= page_size)).all()
        assert (paged_kv_indptr.diff() > 0).all()
        assert num_qo_heads % num_kv_heads == 0
        in_fp8 = kv_data_type == torch.float8_e4m3fn
        assert in_fp8 or q_data_type == kv_data_type
        assert not in_fp8 or self.backend == "fa2", "the other kernels want queries in fp8 too"
        assert q_data_type in (torch.bfloat16, torch.float16)
        assert causal
        plan = [qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len]
        if self.in_graph:
            assert fixed_split_size is None, "a graph has as many programs as when it was captured"
            assert not disable_split_kv, (
                "only programs of splits know that there is no work for them"
            )
            assert uniform_q_len is None or (qo_indptr.diff() == uniform_q_len).all()
            assert num_rows == len(self.buffers[3])
            assert num_rows <= qo_indptr[-1], "FlashInfer counts on a token for each row"
            assert len(paged_kv_indices) <= len(self.buffers[2])
            for buffer, values in zip(self.buffers, plan, strict=True):
                buffer[: len(values)].copy_(values)
        else:
            assert (fixed_split_size is None) == disable_split_kv
            if fixed_split_size is not None:
                assert fixed_split_size > 0
                lens = qo_indptr.diff() * (num_qo_heads // num_kv_heads)
                splits = -(-paged_kv_indptr.diff() // fixed_split_size)
                self._check_workspace(lens, splits, num_qo_heads, num_kv_heads, head_dim_qk)
            self.buffers = [values.clone() for values in plan]
        self.shape = num_qo_heads, num_kv_heads, head_dim_qk, page_size
        self._dtypes, self._scale, self._window = (q_data_type, kv_data_type), sm_scale, window_left
        self._cap = logits_soft_cap
        self._num_tokens = int(qo_indptr[-1])
        self.plans += 1

    def _check_workspace(
        self, lens: Tensor, splits: Tensor, num_heads: int, num_kv_heads: int, head_dim: int
    ) -> None:
        """As fa2's planner: each program of a split row leaves partial results in fp32 for all the
        lines of its tile. `lens`: tokens times the query heads of a KV head."""
        if int(splits.max()) > 1:
            mean = int(lens.sum()) // len(lens)
            tile = 128 if mean > 64 else 64 if mean > 16 else 16
            num_tiles = int((-(-lens // tile) * splits).sum())
            num_rows = -(-num_tiles * tile // (num_heads // num_kv_heads))
            needed = 4 * num_heads * num_rows * (head_dim + 1)
            if needed > self._workspace_bytes:
                raise RuntimeError(f"Buffer overflow: {needed} of {self._workspace_bytes} bytes")

    def run(
        self,
        q: Tensor,
        paged_kv_cache: Tensor | tuple[Tensor, Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Tensor | None = None,
        kv_cache_sf: Tensor | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Tensor:
        assert isinstance(paged_kv_cache, Tensor)
        assert not args
        num_heads, num_kv_heads, head_dim, page_size = self.shape
        assert q.shape == (self._num_tokens, num_heads, head_dim)
        assert q.is_contiguous()
        assert paged_kv_cache.shape[1:] == (2, page_size, num_kv_heads, head_dim)
        assert paged_kv_cache.stride(-1) == 1
        assert (q.dtype, paged_kv_cache.dtype) == self._dtypes
        begins, page_begins, page_ids, last = self.buffers
        num_pages = page_begins.diff()
        tables = torch.zeros(len(last), int(num_pages.max()), dtype=torch.int32)
        for row, count in enumerate(num_pages.tolist()):
            first = int(page_begins[row])
            tables[row, :count] = page_ids[first : first + count]
        call = AttentionCall(
            q,
            paged_kv_cache,
            tables,
            begins,
            (num_pages - 1) * page_size + last,
            self._scale or head_dim**-0.5,
            None if self._window < 0 else self._window + 1,
            int(begins.diff().max()),
            self._cap,
        )
        return ReferenceKernels().paged_attention(call)
