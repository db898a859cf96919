"""Computes steps whose inputs are on the device: from a graph or launch by launch, after attention
is planned. With several ranks each has its own `ModelSteps`, and all compute the same steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvops import AttentionShape, Backend
from kvops.step import AttentionStep, page_facts
from services.engine.device.graphs import DecodeGraphs, Graph, cuda_graphs
from services.engine.device.inputs import Indices, block_pairs
from services.engine.device.threads import use_device
from services.engine.models.model import AdapterRun, Batch, Model
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
    num_rows: int
    """The number of rows without padding."""
    graph_size: int | None = None
    """The rows of the graph that computes the step; None if no graph does."""
    wants_all: bool = False
    """Whether the state of every row is wanted, in order."""
    adapters: tuple[AdapterRun, ...] = ()


class ModelSteps:
    """The steps of one model, or of one shard of it, on an arena."""

    def __init__(self, model: Model, kv: Tensor, block_size: int, ops: Backend) -> None:
        self._model = model
        self._kv = kv
        self._block_size = block_size
        self._ops = ops
        self._attention = attention_shape(model.config, block_size, model.dtype, kv.dtype)
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def capture(self, max_rows: int, new_graph: Callable[[], Graph] | None = None) -> None:
        """Record decode steps of up to `max_rows` rows as graphs. They write nothing. Tensors that
        a graph reads stay where they are. Without `new_graph` they are CUDA's."""
        use_device(self._kv.device)
        context, device = self._model.config.max_position_embeddings, self._kv.device
        max_blocks = -(-context // self._block_size)
        self._ops.set_max_blocks(max_blocks)
        all_rows = torch.arange(max_rows, device=device)
        page_ids = torch.zeros(max_rows, dtype=torch.int32, device=device)

        def forward(batch: Batch) -> Tensor:
            return self._model.forward(batch, self._kv, all_rows[: len(batch.token_ids)])

        def before(size: int) -> None:
            begins = np.arange(size + 1, dtype=np.int32)
            self._plan(StepFacts(begins, np.zeros(size, np.int32), size, size), page_ids[:size])

        make = new_graph or cuda_graphs()
        graphs = DecodeGraphs(forward, max_rows, max_blocks, device, make)
        graphs.capture(before)
        self._graphs = graphs

    def warm_up(self, max_rows: int) -> None:
        """Compile attention for steps of up to `max_rows` rows."""
        use_device(self._kv.device)
        self._ops.warm_up(self._kv[:, 0], self._attention, max_rows)

    def graph_size(self, num_rows: int) -> int | None:
        """The rows of the smallest graph that holds so many; None: there is none."""
        return None if self._graphs is None else self._graphs.size_for(num_rows)

    def compute(self, placed: Mapping[str, Tensor], facts: StepFacts) -> Tensor:
        """Compute a step, and store its KV. `placed` has the tensors of its batch, the tokens with
        `wanted` states, and, on a backend that plans, the `page_ids` of its rows. Returns the
        wanted states, until the next call."""
        self._plan(facts, placed.get("page_ids"))
        if facts.graph_size is not None:
            assert self._graphs is not None
            states = self._graphs.replay(facts.graph_size, placed)
            return states[: facts.num_rows] if facts.wants_all else states[placed["wanted"]]
        batch = Batch(
            **{name: placed[name] for name in BATCH_TENSORS},
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
        in_graph = facts.graph_size is not None
        self._ops.plan(
            AttentionStep(self._attention, facts.query_begins, begins, last, page_ids, in_graph)
        )
