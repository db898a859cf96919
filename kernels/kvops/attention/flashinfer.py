"""Attention by FlashInfer; the Triton backend has all other operations.

FlashInfer takes one layer of the arena as it is, `[num_blocks, 2, page, K, D]` with a block's
stride, and pages of any size. Its kernels are told on the host how to divide the work, once a step
(`plan`): from lengths that the host knows, so that nothing waits for the device.

An eager decode step divides a row's context into splits of a fixed size, so that a row's bits do
not depend on the other rows. A CUDA graph has a fixed number of programs: there FlashInfer chooses
the size of the splits, and bits depend on the batch. Other steps have programs enough without
splits, whose partial results would need gigabytes. An eager decode step whose partial results do
not fit into the workspace is computed in several runs of some rows each, to the same bits. A graph
gets a workspace that its programs' partial results fit into.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
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


@dataclass(frozen=True, slots=True)
class _Run:
    """A planned run of `num_tokens` tokens."""

    wrapper: Any
    num_tokens: int


class FlashInferKernels(TritonKernels):
    """Plans share workspaces, since steps follow each other on one stream."""

    name = "flashinfer"
    reads_whole_blocks = True
    has_sinks = False
    needs_plan = True

    def __init__(self) -> None:
        """Raises ValueError for a version with another interface."""
        if not flashinfer.__version__.startswith(tuple(f"{version}." for version in VERSIONS)):
            raise ValueError(
                f"attention 'flashinfer' needs flashinfer {' or '.join(VERSIONS)}, "
                f"{flashinfer.__version__} is installed"
            )
        self._workspace: Tensor | None = None
        self._wrappers: dict[tuple[str, int | None, int, torch.dtype], Any] = {}
        self._planned: Mapping[int | None, list[_Run]] = {}
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
        """Load, or compile, the kernels of all steps: plan steps of one token and of two."""
        for num_tokens in (1, 2):
            begins = np.array([0, num_tokens], np.int32)
            page_ids = torch.zeros(num_tokens, dtype=torch.int32, device=self.device)
            self.plan(AttentionStep(shape, begins, begins, np.ones(1, np.int32), page_ids))

    def warm_up(self, kv_layer: Tensor, shape: AttentionShape, max_rows: int) -> None:
        """Nothing: the runner's first steps load the kernels."""

    def clear_begun_blocks(self, kv: Tensor, slot_mapping: Tensor) -> None:
        fusions.clear_begun_blocks(kv, slot_mapping)

    def plan(self, step: AttentionStep) -> None:
        """Plan the step that is launched next, for each window of the model's layers."""
        if self._copied is not None:  # FlashInfer copies plans from one pinned buffer
            self._copied.synchronize()
        num_rows = len(step.last_page_lens)
        is_decode, query_len = bool((np.diff(step.query_begins) == 1).all()), step.graph_query_len
        kind = f"graph {query_len}" if query_len else "decode" if is_decode else "prefill"
        parts = _parts(step) if kind == "decode" else [step]
        self._scale_and_cap = step.shape.softmax_scale, step.shape.cap
        self._planned = {
            window: [
                _Run(
                    self._planned_wrapper(kind, window, num_rows if query_len else number, part),
                    int(part.query_begins[-1]),
                )
                for number, part in enumerate(parts)
            ]
            for window in step.shape.windows
        }
        if step.page_ids.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def _planned_wrapper(
        self, kind: str, window: int | None, number: int, step: AttentionStep
    ) -> Any:
        """Plan a part of a step by its `number`, or a graph of `number` rows."""
        shape, key = step.shape, (kind, window, number, step.shape.kv_dtype)
        if key not in self._wrappers:
            self._wrappers[key] = self._wrapper(kind, step)
        wrapper, query_len = self._wrappers[key], step.graph_query_len
        is_uniform = query_len and query_len * number == step.query_begins[-1]
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
            fixed_split_size=_split_pages(shape) if kind == "decode" else None,
            disable_split_kv=kind == "prefill",
            uniform_q_len=query_len if is_uniform else None,
        )
        return wrapper

    def _wrapper(self, kind: str, step: AttentionStep) -> Any:
        """Make a wrapper of the kernels that can split a context ("fa2") for decode steps and
        graphs, and of the kernels that FlashInfer chooses for other steps. Beside keys and values
        in fp8, only "fa2" takes queries of 16 bits."""
        device, shape, graph_rows = step.page_ids.device, step.shape, 0
        chooses = kind == "prefill" and shape.kv_dtype == shape.dtype
        needed = _WORKSPACE_BYTES
        if step.graph_query_len:
            graph_rows = len(step.last_page_lens)
            needed = max(needed, graph_bytes(step, _num_sms(device)))
        if self._workspace is None or len(self._workspace) < needed:
            self._workspace = torch.zeros(needed, dtype=torch.uint8, device=device)
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
            backend="auto" if chooses else "fa2",
        )

    def paged_attention(self, call: AttentionCall) -> Tensor:
        """Compute with the lengths of `plan`. Raises RuntimeError if nothing is planned for this
        window, and ValueError if the plan has another scale or soft cap."""
        if call.window not in self._planned:
            raise RuntimeError(f"no step is planned for layers with the window {call.window}")
        if (call.scale, call.cap) != self._scale_and_cap:
            raise ValueError(
                f"scale {call.scale} and cap {call.cap} are not {self._scale_and_cap}, as planned"
            )
        runs = self._planned[call.window]
        queries = torch.split(call.q.contiguous(), [run.num_tokens for run in runs])
        outs = [
            run.wrapper.run(part, call.kv_layer) for run, part in zip(runs, queries, strict=True)
        ]
        return outs[0] if len(outs) == 1 else torch.cat(outs)


def graph_bytes(step: AttentionStep, num_sms: int) -> int:
    """The bytes of the partial results of a graph's programs. Each program has a tile of queries of
    one KV head. There are as many as fill the GPU, or one for each tile that rows can begin."""
    shape, num_rows = step.shape, len(step.last_page_lens)
    group = shape.num_heads // shape.num_kv_heads
    lines = group * (step.graph_query_len or 1)  # of the longest row
    tile = 16 if lines <= 16 else 64 if lines <= 64 or shape.head_dim >= 256 else 128
    num_tiles = -(-int(step.query_begins[-1]) * group // tile) + num_rows
    num_programs = max(2 * num_sms // shape.num_kv_heads, num_tiles)
    return 4 * shape.num_heads * num_programs * tile * (shape.head_dim + 1)


def _num_sms(device: torch.device) -> int:
    is_gpu = device.type == "cuda"
    return torch.cuda.get_device_properties(device).multi_processor_count if is_gpu else 1


def _split_pages(shape: AttentionShape) -> int:
    """The pages of a split in an eager decode step."""
    return max(1, _SPLIT // shape.block_size)


def _parts(step: AttentionStep) -> list[AttentionStep]:
    """The rows of an eager decode step, in parts whose partial results fit into the workspace."""
    shape = step.shape
    lines = shape.num_heads // shape.num_kv_heads  # of a row, in the tile of one KV head
    tile = 16 if lines <= 16 else 64 if lines <= 64 else 128
    # Some versions of 0.7 count a tile for each query head; later ones need less.
    split_bytes = 4 * shape.num_heads * tile * (shape.head_dim + 1)
    splits = -(-np.diff(step.page_begins) // _split_pages(shape))
    begins, used = [0], 0
    for row, row_bytes in enumerate((splits * split_bytes).tolist()):
        if used and used + row_bytes > _WORKSPACE_BYTES:
            begins.append(row)
            used = 0
        used += row_bytes
    if len(begins) == 1:
        return [step]
    return [_rows(step, *pair) for pair in pairwise([*begins, len(splits)])]


def _rows(step: AttentionStep, begin: int, end: int) -> AttentionStep:
    """Rows `begin` to `end` of a step, `end` exclusive."""
    queries, pages = step.query_begins[begin : end + 1], step.page_begins[begin : end + 1]
    return replace(
        step,
        query_begins=queries - queries[0],
        page_begins=pages - pages[0],
        last_page_lens=step.last_page_lens[begin:end],
        page_ids=step.page_ids[pages[0] : pages[-1]],
    )
