"""Steps as CUDA graphs: the launches of a forward pass, recorded once for each of a few shapes of
steps, and replayed in one call. Decode steps have graphs by their number of rows, steps with chunks
of prompts by their number of tokens.

    decode step of 5 rows      | r0 | r1 | r2 | r3 | r4 |
    graph of 6 rows            | r0 | r1 | r2 | r3 | r4 | -- |

    chunks of 5 and 1 tokens   | r0   r0   r0   r0   r0 | r1 |
    graph of 8 tokens          | r0   r0   r0   r0   r0 | r1 | --   -- |     further rows are empty

A padded token has slot -1, so that nothing is stored, and its row has no context.

A graph reads and writes the memory that its launches were recorded with. So a step's inputs are
copied into static tensors, from which all graphs read, and a smaller step is padded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from services.engine.device.inputs import Indices
from services.engine.models import Batch
from services.engine.models.model import AdapterRun, AdapterTables

_NUM_WARM_UPS = 2
"""Before a capture: kernels are compiled, and libraries allocate what they keep."""

_OF_TOKENS = ("token_ids", "positions", "slot_mapping")
"""The inputs with a value for each token of a step."""


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
        # An operation of another thread meanwhile, such as a copy, is no error of the capture.
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


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The shape of the steps that one graph computes, padding included."""

    num_tokens: int
    num_rows: int
    query_len: int
    """The most tokens of a row: 1 in a decode step."""
    has_adapters: bool = False
    """Whether tokens may have adapters."""

    def fits(self, num_tokens: int, num_rows: int, has_adapters: bool = False) -> bool:
        """Whether the graph computes a step of so many tokens and rows. Beside chunks of prompts,
        one row is left for the padded tokens."""
        if self.has_adapters != has_adapters:
            return False
        if self.query_len == 1:
            return num_tokens == num_rows <= self.num_rows
        return num_tokens <= self.num_tokens and num_rows < self.num_rows

    def begins(self, known: Indices) -> Indices:
        """The `cu_query_lens` of a padded step; `known` has its first values. Padded tokens are in
        the first padded rows."""
        more = self.num_rows + 1 - len(known)
        padded = known[-1] + self.query_len * np.arange(1, more + 1)
        return np.concatenate([known, padded.clip(max=self.num_tokens)]).astype(np.int32)


_MAX_CHUNK_TOKENS = 512
"""Larger steps take longer on the device than their launches take on the host."""

_CHUNK_ROWS = (16, 64)
"""The rows of graphs of chunks. Fewer are faster: attention has programs for the tiles that as many
rows could begin, and FlashInfer smaller tiles and more memory for partial results."""


def graph_shapes(
    max_rows: int, max_tokens: int, *, with_adapters: bool = False
) -> list[GraphShape]:
    """The shapes that have graphs, the smallest first, for decode steps of up to `max_rows` rows
    and steps of up to `max_tokens` tokens. Chunks have powers of two, so that padding at most
    doubles a step; a step of two tokens is a decode step. `with_adapters`: each shape has a graph
    with adapters too, beside the one without, which has 8 launches a layer less."""
    shapes = [GraphShape(size, size, 1) for size in ladder(max_rows)]
    size = 4
    while size < 2 * max_tokens and size <= _MAX_CHUNK_TOKENS:
        shapes += [GraphShape(size, rows, size) for rows in {min(size, n) for n in _CHUNK_ROWS}]
        size *= 2
    if with_adapters:
        shapes += [replace(shape, has_adapters=True) for shape in shapes]
    return sorted(shapes, key=lambda shape: (shape.num_tokens, shape.query_len, shape.num_rows))


class StepGraphs:
    """The graphs of one runner. `forward` computes a batch, and returns the states of all tokens.
    `max_rank` is the largest rank of adapters in graphs that have them."""

    def __init__(
        self,
        forward: Callable[[Batch], Tensor],
        shapes: Sequence[GraphShape],
        max_blocks: int,
        device: torch.device,
        new_graph: Callable[[], Graph],
        max_rank: int = 0,
    ) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        max_tokens = max(shape.num_tokens for shape in shapes)
        max_rows = max(shape.num_rows for shape in shapes)
        self._shapes = shapes
        self._forward = forward
        self._new_graph = new_graph
        self._inputs = {
            "token_ids": zeros(max_tokens),
            "positions": zeros(max_tokens),
            "slot_mapping": zeros(max_tokens),
            "context_lens": zeros(max_rows, dtype=torch.int32),
        }
        self._tables = zeros(max_rows, max_blocks, dtype=torch.int32)
        self._adapters = AdapterTables(zeros(max_tokens), max_rank)
        self._graphs: dict[GraphShape, tuple[Graph, Batch, Tensor]] = {}

    def shape_for(
        self, num_tokens: int, num_rows: int, has_adapters: bool = False
    ) -> GraphShape | None:
        """The smallest graph for a step of so many tokens and rows; None if there is none."""
        step = num_tokens, num_rows, has_adapters
        return next((shape for shape in self._shapes if shape.fits(*step)), None)

    def capture(self, before: Callable[[GraphShape, Indices], None]) -> None:
        """Record all graphs, the largest first, so that the others fit into its memory. Their
        tokens have slot -1. `before` is called for each shape with the values of its
        `cu_query_lens`, before its first launch."""
        self._inputs["slot_mapping"].fill_(-1)
        for shape in reversed(self._shapes):
            begins = shape.begins(np.zeros(1, np.int32))
            before(shape, begins)
            batch = self._batch(shape, begins)
            for _ in range(_NUM_WARM_UPS):
                self._forward(batch)
            graph = self._new_graph()
            states = graph.capture(partial(self._forward, batch))
            self._graphs[shape] = graph, batch, states

    def replay(
        self, shape: GraphShape, placed: Mapping[str, Tensor], adapters: Sequence[AdapterRun] = ()
    ) -> Tensor:
        """Compute a step that `padded` has padded to the shape; `placed` are its arrays on the
        device. Returns the states of all tokens, [tokens, hidden_size], until the next call."""
        graph, batch, states = self._graphs[shape]
        for name in self._inputs:
            getattr(batch, name).copy_(placed[name])
        if shape.query_len > 1:
            batch.cu_query_lens.copy_(placed["cu_query_lens"])
        tables = placed["block_tables"]
        batch.block_tables[:, : tables.shape[1]].copy_(tables)
        if batch.tables is not None:
            addresses = batch.tables.addresses.zero_()
            for run in adapters:
                addresses[run.begin : run.end].fill_(run.adapter.table.data_ptr())
        graph.replay()
        return states

    def _batch(self, shape: GraphShape, begins: Indices) -> Batch:
        rows, tokens = shape.num_rows, shape.num_tokens
        addresses, rank = self._adapters.addresses[:tokens], self._adapters.max_rank
        of_tokens: dict[str, Any] = {name: self._inputs[name][:tokens] for name in _OF_TOKENS}
        return Batch(
            **of_tokens,
            context_lens=self._inputs["context_lens"][:rows],
            block_tables=self._tables[:rows],
            cu_query_lens=torch.from_numpy(begins).to(self._tables.device),
            max_query_len=shape.query_len,
            tables=AdapterTables(addresses, rank) if shape.has_adapters else None,
        )


def padded(arrays: Mapping[str, Indices], shape: GraphShape) -> dict[str, Indices]:
    """The arrays of a step with tokens and rows added up to the shape."""
    more_tokens = shape.num_tokens - len(arrays["token_ids"])
    more_rows = shape.num_rows - len(arrays["context_lens"])
    result = dict(arrays)
    for name in _OF_TOKENS:
        fill = -1 if name == "slot_mapping" else 0
        result[name] = np.pad(arrays[name], (0, more_tokens), constant_values=fill)
    result["context_lens"] = np.pad(arrays["context_lens"], (0, more_rows))
    result["block_tables"] = np.pad(arrays["block_tables"], ((0, more_rows), (0, 0)))
    result["cu_query_lens"] = shape.begins(arrays["cu_query_lens"])
    return result
