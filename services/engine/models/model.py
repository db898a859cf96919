"""What a runner asks of a model, whatever computes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from services.common.text.model_config import ModelConfig
from services.engine.batch import Answer, Fault, Query


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of one step: T new tokens of B rows, row after row; see `kvops.ops`.

    token_ids, positions, slot_mapping: [T] int64. block_tables: [B, any] int32. cu_query_lens:
    [B + 1] int32. context_lens: [B] int32, new tokens included.
    """

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    cu_query_lens: Tensor
    context_lens: Tensor


class Model(Protocol):
    """Weights and arithmetic; the KV it reads and writes is the caller's.

    `dtype`: of activations and KV. `weights_digest`: `weights.weights_digest` of its checkpoint.
    """

    config: ModelConfig
    weights_digest: str

    @property
    def dtype(self) -> torch.dtype: ...

    def forward(self, batch: Batch, kv: Tensor, wanted: Tensor) -> Tensor:
        """Final hidden states [len(wanted), hidden_size] of the tokens `wanted`, rising indices
        into [T]; writes the new tokens' KV into the arena `kv`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden_size] -> fp32 [N, vocab_size]."""
        ...

    def answer(self, hidden: Tensor, queries: Sequence[Query]) -> list[Answer | Fault]:
        """What `services.engine.sampling.sampling_head` says of the states [N, hidden_size] that
        `queries` ask,
        which are all of them; the head's weights are read once for those that draw."""
        ...
