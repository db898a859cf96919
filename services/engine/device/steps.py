"""Computes steps whose inputs are on the device: from a graph or launch by launch, after attention
is planned. With several ranks each has its own `ModelSteps`, and all compute the same steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvops import AttentionShape, Backend
from kvops.step import AttentionStep, page_facts
from services.engine.device.graphs import (
    Graph,
    GraphShape,
    StepGraphs,
    cuda_graphs,
    graph_shapes,
)
from services.engine.device.inputs import Indices, block_pairs
from services.engine.device.threads import use_device
from services.engine.models.model import AdapterRun, Batch, Model
from services.engine.weights.adapter_weights import largest_rank
from services.model.config.model_config import ModelConfig

BATCH_TENSORS = (
    *("token_ids", "positions", "slot_mapping"),
    *("block_tables", "cu_query_lens", "context_lens"),
)
STEP_TENSORS = (*BATCH_TENSORS, "wanted", "page_ids")
"""The tensors that `ModelSteps.compute` reads."""

Pairs = Sequence[tuple[int, int]]
"""Blocks to copy, (source, target) each."""


def attention_shape(
    config: ModelConfig, block_size: int, dtype: torch.dtype, kv_dtype: torch.dtype
) -> AttentionShape:
    return AttentionShape(
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=block_size,
        dtype=dtype,
        kv_dtype=kv_dtype,
        windows=tuple(dict.fromkeys(config.windows)),
        scale=config.attention_scale,
        cap=config.attention_cap,
        has_sinks=config.family.sinks,
    )


@dataclass(frozen=True, slots=True, eq=False)
class StepFacts:
    """A step's facts on the host."""

    query_begins: Indices
    """The values of the batch's `cu_query_lens`, with padded rows."""
    context_lens: Indices
    """The values of the batch's `context_lens`, with padded rows."""
    num_tokens: int
    """The number of new tokens without padding."""
    graph: GraphShape | None = None
    """The shape of the graph that computes the step; None if no graph does."""
    adapters: tuple[AdapterRun, ...] = ()


class ModelSteps:
    """The steps of one model, or of one shard of it, on an arena."""

    def __init__(self, model: Model, kv: Tensor, block_size: int, ops: Backend) -> None:
        self._model = model
        self._kv = kv
        self._block_size = block_size
        self._ops = ops
        self._attention = attention_shape(model.config, block_size, model.dtype, kv.dtype)
        self._graphs: StepGraphs | None = None

    @torch.inference_mode()
    def capture(
        self,
        max_rows: int,
        max_tokens: int,
        new_graph: Callable[[], Graph] | None = None,
        max_lora_rank: int = 0,
    ) -> None:
        """Record the graphs of `graph_shapes`. They write nothing. Tensors that a graph reads stay
        where they are. Without `new_graph` they are CUDA's. Steps with adapters of up to
        `max_lora_rank` have graphs if that is not 0 and the backend has a kernel for them."""
        use_device(self._kv.device)
        context, device = self._model.config.max_position_embeddings, self._kv.device
        max_blocks = -(-context // self._block_size)
        self._ops.set_max_blocks(max_blocks)
        with_adapters = max_lora_rank > 0 and self._ops.has_low_rank
        shapes = graph_shapes(max_rows, max_tokens, with_adapters=with_adapters)
        all_tokens = torch.arange(shapes[-1].num_tokens, device=device)
        page_ids = torch.zeros_like(all_tokens, dtype=torch.int32)

        def forward(batch: Batch) -> Tensor:
            return self._model.forward(batch, self._kv, all_tokens[: len(batch.token_ids)])

        def before(shape: GraphShape, begins: Indices) -> None:
            lens = np.zeros(shape.num_rows, np.int32)
            facts = StepFacts(begins, lens, shape.num_tokens, shape)
            self._plan(facts, page_ids[: shape.num_rows])

        make = new_graph or cuda_graphs()
        graphs = StepGraphs(forward, shapes, max_blocks, device, make, largest_rank(max_lora_rank))
        graphs.capture(before)
        self._graphs = graphs

    def warm_up(self, max_rows: int) -> None:
        """Compile attention for steps of up to `max_rows` rows."""
        use_device(self._kv.device)
        self._ops.warm_up(self._kv[:, 0], self._attention, max_rows)

    def graph_for(
        self, num_tokens: int, num_rows: int, has_adapters: bool = False
    ) -> GraphShape | None:
        """The smallest graph for a step of so many tokens and rows; None if there is none."""
        graphs = self._graphs
        return None if graphs is None else graphs.shape_for(num_tokens, num_rows, has_adapters)

    def compute(self, placed: Mapping[str, Tensor], facts: StepFacts) -> Tensor:
        """Compute a step, and store its KV. `placed` has the tensors of its batch, the tokens with
        `wanted` states, and, on a backend that plans, the `page_ids` of its rows. Returns the
        wanted states, until the next call."""
        self._plan(facts, placed.get("page_ids"))
        if facts.graph is not None:
            assert self._graphs is not None
            states = self._graphs.replay(facts.graph, placed, facts.adapters)
            wanted, num_tokens = placed["wanted"], facts.num_tokens
            return states[:num_tokens] if len(wanted) == num_tokens else states[wanted]
        tensors: dict[str, Any] = {name: placed[name] for name in BATCH_TENSORS}
        batch = Batch(
            **tensors,
            max_query_len=int(np.diff(facts.query_begins).max()),
            adapters=facts.adapters,
        )
        return self._model.forward(batch, self._kv, placed["wanted"])

    def copy_blocks(self, pairs: Pairs) -> None:
        """Copy blocks; all sources are read before any target is written."""
        use_device(self._kv.device)
        self._ops.copy_blocks(self._kv, block_pairs(pairs, self._kv.device))

    def _plan(self, facts: StepFacts, page_ids: Tensor | None) -> None:
        if not self._ops.needs_plan:
            return
        assert page_ids is not None
        num_pages, last = page_facts(facts.context_lens, self._block_size)
        begins = np.concatenate([[0], num_pages.cumsum()]).astype(np.int32)
        query_len = facts.graph.query_len if facts.graph else None
        self._ops.plan(
            AttentionStep(self._attention, facts.query_begins, begins, last, page_ids, query_len)
        )
