"""The interface between the runner and a model."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from services.engine.sampling.logprobs import ScoreTensors
from services.engine.sampling.sampling_batch import SamplingBatch
from services.model.checkpoint.adapter import AdapterFiles
from services.model.config.model_config import ModelConfig
from services.model.structured.mask import Mask


@dataclass(frozen=True, slots=True)
class AdapterRun:
    """Consecutive tokens of a step that have one adapter, which `Model.load_adapter` has made."""

    adapter: Any
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class AdapterTables:
    """The adapters of the tokens of a CUDA graph; see `kvops.ops.Backend.add_low_rank`."""

    addresses: Tensor
    """The address of the table of each token's adapter, or 0 without one, [T] int64."""
    max_rank: int
    """The largest rank of A and B."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The tensors of one step: T new tokens of B rows, row after row; see `kvops.ops`. Kernels know
    `max_query_len` on the host, so that they do not wait for the device to tell."""

    token_ids: Tensor
    """[T] int64, as are `positions` and `slot_mapping`."""
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    """[B, any] int32."""
    cu_query_lens: Tensor
    """[B + 1] int32."""
    context_lens: Tensor
    """[B] int32, new tokens included."""
    max_query_len: int
    """The new tokens of the row with the most."""
    adapters: tuple[AdapterRun, ...] = ()
    """The adapters of the last tokens; the tokens before have none."""
    tables: AdapterTables | None = None
    """The tokens' adapters in a graph of steps with adapters; `adapters` is empty then."""

    @property
    def is_decode(self) -> bool:
        """Whether every row has one new token."""
        return self.max_query_len == 1


def embedding_scale(config: ModelConfig, dtype: torch.dtype) -> float:
    """Return the factor of embeddings. The root of the hidden size is rounded to the dtype of the
    computation, as it was when the models were trained."""
    scale = config.embedding_scale
    return torch.tensor(scale, dtype=dtype).item() if config.family.scaled_embedding else scale


class Model(Protocol):
    """A decoder's weights and arithmetic. The KV that it reads and writes belongs to the caller."""

    weights_digest: str
    """The digest of the checkpoint's weight files (`services.engine.weights.checkpoint`)."""

    @property
    def config(self) -> ModelConfig:
        """The configuration of this model; the part of one rank has that rank's heads."""

    @property
    def whole_config(self) -> ModelConfig:
        """The configuration of the checkpoint."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of activations and KV."""

    @property
    def device(self) -> torch.device: ...

    def load_adapter(self, files: AdapterFiles) -> Any:
        """Load a LoRA adapter, for rows of a step. Any thread may call this beside steps. Raises
        OSError or SafetensorError if the adapter's file is not readable, and ValueError if this
        model takes no adapters."""
        ...

    def forward(self, batch: Batch, kv: Tensor, wanted: Tensor) -> Tensor:
        """Compute the batch and write the KV of its tokens into the arena `kv`. Returns the final
        hidden states of the tokens `wanted` (ascending indices into [T]) as [len(wanted),
        hidden_size]."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of states [N, hidden_size] as fp32 [N, vocab_size]."""
        ...

    def draw(
        self, states: Tensor, batch: SamplingBatch, masks: Sequence[Mask | None]
    ) -> Sequence[Tensor]:
        """Draw the tokens of the batch after the states that draw, on the host, in one pass over
        the head: `sampler.draw` of their logits."""
        ...

    def score(self, states: Tensor, token_ids: Tensor, num_top: int) -> ScoreTensors:
        """Return the scores of `token_ids[i]` after state i (`logprobs.score_tensors`), with only
        some of the logits in memory at once."""
        ...
