"""Attention by FlashInfer; all other operations are those of the Triton backend.

FlashInfer takes one layer of the arena as it is, `[num_blocks, 2, page, K, D]` with a block's
stride, and pages of any size. Its kernels are told on the host how to divide the work, once a step
(`plan`): from lengths that the host knows, so that nothing waits for the device.

An eager decode step divides a row's context into splits of a fixed size, so that a row's bits do
not depend on the other rows. A CUDA graph has a fixed number of programs: there FlashInfer chooses
the size of the splits, and bits depend on the batch. Other steps have programs enough without
splits, whose partial results would need gigabytes.

It has run on no GPU yet.
"""

from collections.abc import Mapping
from typing import Any

import flashinfer  # type: ignore[import-not-found]  # installed on GPU machines only
import numpy as np
import torch
from torch import Tensor

from kvops.step import AttentionCall, AttentionShape, AttentionStep
from kvops.triton import TritonKernels, fusions

VERSIONS = ("0.7",)
HEAD_DIMS = (64, 128, 256)
_WORKSPACE_BYTES = 256 << 20
_SPLIT = 4096  # positions
_LAYOUT = "NHD"


class FlashInferKernels(TritonKernels):
    """`workspace`: shared by all plans, since steps follow each other on one stream."""

    name = "flashinfer"
    reads_whole_blocks = True
    needs_plan = True

    def __init__(self) -> None:
        """ValueError: a version whose interface is another one."""
        if not flashinfer.__version__.startswith(tuple(f"{version}." for version in VERSIONS)):
            raise ValueError(
                f"attention 'flashinfer' needs flashinfer {' or '.join(VERSIONS)}, "
                f"{flashinfer.__version__} is installed"
            )
        self._workspace: Tensor | None = None
        self._wrappers: dict[tuple[str, int | None, int], Any] = {}
        self._planned: Mapping[int | None, Any] = {}
        self._scale_and_cap: tuple[float, float | None] = (1.0, None)
        self._copied: torch.cuda.Event | None = None

    def numerics(self) -> dict[str, str]:
        return {**super().numerics(), "flashinfer": flashinfer.__version__}

    def check_attention(self, shape: AttentionShape) -> None:
        if shape.head_dim not in HEAD_DIMS:
            sizes = ", ".join(map(str, HEAD_DIMS))
            raise ValueError(
                f"attention 'flashinfer' has head sizes {sizes}, this model {shape.head_dim}: "
                "choose --attention triton"
            )
        if shape.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"attention 'flashinfer' computes in bf16 and fp16, not in {shape.dtype}"
            )
        try:
            self._load(shape)
        except (RuntimeError, OSError) as error:
            raise ValueError(
                "attention 'flashinfer' has no compiled kernels, and cannot compile them here: "
                f"install flashinfer-jit-cache {flashinfer.__version__}, or nvcc: {error}"
            ) from error

    def _load(self, shape: AttentionShape) -> None:
        """Load, or compile, the kernels of all steps: plan a decode step, and one of two tokens."""
        for num_tokens in (1, 2):
            begins = np.array([0, num_tokens], np.int32)
            page_ids = torch.zeros(num_tokens, dtype=torch.int32, device=self.device)
            self.plan(AttentionStep(shape, begins, begins, np.ones(1, np.int32), page_ids))

    def warm_up(self, kv_layer: Tensor, num_heads: int, max_rows: int, cap: float | None) -> None:
        """Nothing: the runner's first steps load the kernels."""

    def clear_begun_blocks(self, kv: Tensor, slot_mapping: Tensor) -> None:
        fusions.clear_begun_blocks(kv, slot_mapping)

    def plan(self, step: AttentionStep) -> None:
        """Plan the step that is launched next, for each window of the model's layers."""
        if self._copied is not None:  # FlashInfer copies plans from one pinned buffer
            self._copied.synchronize()
        num_rows = len(step.last_page_lens)
        is_decode = bool((np.diff(step.query_begins) == 1).all())
        kind = "graph" if step.in_graph else "decode" if is_decode else "prefill"
        rows = num_rows if step.in_graph else 0
        self._scale_and_cap = step.shape.softmax_scale, step.shape.cap
        self._planned = {
            window: self._planned_wrapper(kind, window, rows, step) for window in step.shape.windows
        }
        if step.page_ids.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def _planned_wrapper(
        self, kind: str, window: int | None, graph_rows: int, step: AttentionStep
    ) -> Any:
        shape, key = step.shape, (kind, window, graph_rows)
        if key not in self._wrappers:
            self._wrappers[key] = self._wrapper(kind, graph_rows, step.page_ids.device)
        wrapper = self._wrappers[key]
        wrapper.plan(
            torch.from_numpy(step.query_begins),
            torch.from_numpy(step.page_begins),
            step.page_ids,
            torch.from_numpy(step.last_page_lens),
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.block_size,
            causal=True,
            sm_scale=shape.softmax_scale,
            logits_soft_cap=shape.cap,
            window_left=-1 if window is None else window - 1,
            q_data_type=shape.dtype,
            kv_data_type=shape.kv_dtype,
            fixed_split_size=max(1, _SPLIT // shape.block_size) if kind == "decode" else None,
            disable_split_kv=kind == "prefill",
            uniform_q_len=1 if graph_rows else None,
        )
        return wrapper

    def _wrapper(self, kind: str, graph_rows: int, device: torch.device) -> Any:
        """Decode steps are computed by the kernels that can split a context ("fa2"); for prefill
        FlashInfer chooses those of the GPU."""
        if self._workspace is None:
            self._workspace = torch.zeros(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        buffers: dict[str, Tensor] = {}
        if graph_rows:

            def ints(size: int) -> Tensor:
                return torch.zeros(size, dtype=torch.int32, device=device)

            buffers = {
                "qo_indptr_buf": ints(graph_rows + 1),
                "paged_kv_indptr_buf": ints(graph_rows + 1),
                "paged_kv_indices_buf": ints(graph_rows * self.max_blocks),
                "paged_kv_last_page_len_buf": ints(graph_rows),
            }
        return flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            self._workspace,
            _LAYOUT,
            use_cuda_graph=bool(graph_rows),
            **buffers,
            backend="auto" if kind == "prefill" else "fa2",
        )

    def paged_attention(self, call: AttentionCall) -> Tensor:
        """As planned: the lengths are those of `plan`. RuntimeError: nothing is planned for this
        window. ValueError: another scale or soft cap than in the plan."""
        if call.window not in self._planned:
            raise RuntimeError(f"no step is planned for layers with the window {call.window}")
        if (call.scale, call.cap) != self._scale_and_cap:
            raise ValueError(
                f"scale {call.scale} and cap {call.cap} are not {self._scale_and_cap}, as planned"
            )
        out: Tensor = self._planned[call.window].run(call.q.contiguous(), call.kv_layer)
        return out
