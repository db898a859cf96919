"""The interface between the runner and a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from services.common.checkpoint.adapter import AdapterFiles
from services.common.text.model_config import ModelConfig
from services.engine.batch import Answer, Fault, Query


@dataclass(frozen=True, slots=True)
class AdapterRun:
    """Consecutive tokens of a step that have one adapter, which `Model.load_adapter` has made."""

    adapter: Any
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of one step: T new tokens of B rows, row after row; see `kvops.ops`.

    token_ids, positions, slot_mapping: [T] int64. block_tables: [B, any] int32. cu_query_lens:
    [B + 1] int32. context_lens: [B] int32, new tokens included.

    What kernels need to know on the host, so that they do not wait for the device to tell: the
    longest row's new tokens, and the longest context.

    `adapters`: those of the last tokens; the tokens before have none.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    cu_query_lens: Tensor
    context_lens: Tensor
    max_query_len: int
    max_context_len: int
    adapters: tuple[AdapterRun, ...] = ()

    @property
    def is_decode(self) -> bool:
        """Whether every row has one new token."""
        return self.max_query_len == 1


def embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    """The factor of embeddings. The root of the hidden size is rounded to the dtype of the
    computation, as where the models were trained."""
    scale = config.embedding_scale
    return torch.tensor(scale, dtype=dtype).item() if config.family.scaled_embedding else scale


class Model(Protocol):
    """A decoder's weights and arithmetic. The KV that it reads and writes belongs to the caller.

    `dtype`: that of activations and KV. `weights_digest`: the digest of its checkpoint's weight
    files (`services.engine.weights.checkpoint`).
    """

    weights_digest: str

    @property
    def config(self) -> ModelConfig:
        """If this is the part of one rank: with its heads."""

    @property
    def whole_config(self) -> ModelConfig:
        """That of the checkpoint."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    def load_adapter(self, files: AdapterFiles) -> Any:
        """Load a LoRA adapter, for rows of a step. Any thread may call this beside steps. OSError,
        SafetensorError: its file is not readable. ValueError: this model takes no adapters."""
        ...

    def forward(self, batch: Batch, kv: Tensor, wanted: Tensor) -> Tensor:
        """Compute the batch and write the KV of its tokens into the arena `kv`. Returns the final
        hidden states of the tokens `wanted`, ascending indices into [T]: [len(wanted),
        hidden_size]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> fp32 [N, vocab_size]."""
        ...

    def answer(self, hidden: Tensor, queries: Sequence[Query]) -> list[Answer | Fault]:
        """Answer the queries, as `services.engine.sampling.sampling_head` defines. `hidden`: states
        [N, hidden_size], each with a query. Those that draw share one pass over the head."""
        ...
