"""Decode steps as CUDA graphs: the launches of a forward pass, recorded once for each of a few
numbers of rows, and replayed in one call.

    step of 5 rows   | r0 | r1 | r2 | r3 | r4 |
    graph of 6       | r0 | r1 | r2 | r3 | r4 | -- |     slot -1: nothing is stored; context 0

A graph reads and writes the memory that its launches were recorded with. So a step's inputs are
copied into static tensors, from which all graphs read, and a step with fewer rows is padded.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from services.engine.device.inputs import Indices
from services.engine.models import Batch

_NUM_WARM_UPS = 2
"""Before a capture: kernels are compiled, and libraries allocate what they keep."""


class Graph(Protocol):
    """Recorded launches."""

    def capture(self, launch: Callable[[], Tensor]) -> Tensor:
        """Record what `launch` does. Returns its result: the tensor that each `replay` writes."""
        ...

    def replay(self) -> None: ...


class CudaGraph:
    """A graph in CUDA; `pool`, of `torch.cuda.graph_pool_handle`, is the memory of temporary
    tensors."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph = torch.cuda.CUDAGraph()

    def capture(self, launch: Callable[[], Tensor]) -> Tensor:
        # What other threads do meanwhile, such as a copy, is no error of the capture.
        mode = "thread_local"
        with torch.cuda.graph(self._graph, pool=self._pool, capture_error_mode=mode):
            return launch()

    def replay(self) -> None:
        self._graph.replay()


def cuda_graphs() -> Callable[[], Graph]:
    """Makes the graphs of one runner. They share the memory of their temporary tensors, since only
    one runs at a time. No other runner may share it: PyTorch refuses a pool whose graphs are gone.
    """
    return partial(CudaGraph, torch.cuda.graph_pool_handle())


def ladder(max_rows: int) -> list[int]:
    """The numbers of rows that have graphs, up to `max_rows`: powers of two, and the middle between
    two of them, so that at most a third of a step from 4 rows on is padding."""
    sizes = {max_rows} if max_rows else set()
    size = 1
    while size < max_rows:
        sizes |= {size, size * 3 // 2} if size > 1 else {size}
        size *= 2
    return sorted(found for found in sizes if found <= max_rows)


class DecodeGraphs:
    """The graphs of one runner. `forward` computes a batch, and returns the states of all rows."""

    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        max_rows: int,
        max_blocks: int,
        device: torch.device,
        new_graph: Callable[[], Graph],
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        self.sizes = ladder(max_rows)
        self._forward = forward
        self._new_graph = new_graph
        self._inputs = {
            "token_ids": zeros(max_rows),
            "positions": zeros(max_rows),
            "slot_mapping": zeros(max_rows),
            "context_lens": zeros(max_rows, dtype=torch.int32),
        }
        self._tables = zeros(max_rows, max_blocks, dtype=torch.int32)
        self._begins = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        self._graphs: dict[int, tuple[Graph, Tensor]] = {}

    def size_for(self, num_rows: int) -> int | None:
        """The smallest graph that holds so many rows; None: there is none."""
        return next((size for size in self.sizes if size >= num_rows and self._graphs), None)

    def capture(self, before: Callable[[int], None]) -> None:
        """Record all graphs, the largest first, so that the others fit into its memory. Their rows
        have slot -1. `before` is called for each size, before its first launch."""
        self._inputs["slot_mapping"].fill_(-1)
        for size in reversed(self.sizes):
            before(size)
            batch = self._batch(size)
            for _ in range(_NUM_WARM_UPS):
                self._forward(batch)
            graph = self._new_graph()
            self._graphs[size] = graph, graph.capture(partial(self._forward, batch))

    def replay(self, size: int, placed: Mapping[str, Tensor]) -> Tensor:
        """Compute a step that `padded` has padded to `size` rows; `placed` are its arrays on the
        device. Returns the states of all rows, [size, hidden_size], until the next call."""
        for name, static in self._inputs.items():
            static[:size].copy_(placed[name])
        tables = placed["block_tables"]
        self._tables[:size, : tables.shape[1]].copy_(tables)
        graph, states = self._graphs[size]
        graph.replay()
        return states

    def _batch(self, size: int) -> Batch:
        return Batch(
            **{name: static[:size] for name, static in self._inputs.items()},
            block_tables=self._tables[:size],
            cu_query_lens=self._begins[: size + 1],
            max_query_len=1,
            adapters=(),
        )


def padded(arrays: Mapping[str, Indices], size: int) -> dict[str, Indices]:
    """The arrays of a decode step with rows added up to `size`."""
    more = size - len(arrays["context_lens"])
    fill = {"token_ids": 0, "positions": 0, "slot_mapping": -1, "context_lens": 0}
    result = {
        name: np.pad(array, (0, more), constant_values=fill[name]) if name in fill else array
        for name, array in arrays.items()
    }
    result["block_tables"] = np.pad(arrays["block_tables"], ((0, more), (0, 0)))
    last = arrays["cu_query_lens"][-1]
    result["cu_query_lens"] = np.concatenate(
        [arrays["cu_query_lens"], last + np.arange(1, more + 1, dtype=np.int32)]
    ).astype(np.int32)
    return result
