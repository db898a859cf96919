"""A decoder composed of the operations of `kvops`: Llama's decoder, with what the rows of
`services.model.config.families` add to it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvops import Backend
from kvops.experts import ExpertWeights
from kvops.grouped import GroupedWeight
from kvops.step import HeadNorms
from services.engine.models.model import Batch, embedding_scale
from services.engine.models.rope import rope_tables
from services.engine.ranks.collectives import Collectives
from services.engine.sampling import sampler
from services.engine.sampling.logprobs import ScoreTensors, score_tensors
from services.engine.sampling.sampling_batch import LOGITS_AT_ONCE, SamplingBatch
from services.engine.weights.adapter_weights import joined_adapters
from services.model.checkpoint.adapter import AdapterFiles
from services.model.checkpoint.shards import Shard
from services.model.config.model_config import ModelConfig
from services.model.config.rope_config import RopeConfig
from services.model.structured.mask import Mask


@dataclass(frozen=True, slots=True)
class Linear:
    weight: Tensor | GroupedWeight
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer. A norm that the family does not have is None. A layer has either
    `gate_up` and `down`, or `experts`."""

    attention_in: Tensor | None
    """The norm of the attention's input; `attention_out` is the norm of its output."""
    qkv: Linear
    """Queries, keys and values as one linear: their outputs follow one another, as in `gate_up`."""
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    attention_out: Tensor | None
    mlp_in: Tensor | None
    mlp_out: Tensor | None
    window: int | None
    """How many positions a query attends to, its own included; None is all of them."""
    rope: RopeConfig | None
    """The rotation of queries and keys; None leaves them as they are."""
    gate_up: Linear | None = None
    down: Linear | None = None
    experts: ExpertWeights | None = None
    sinks: Tensor | None = None


_SITES = ("qkv", "output", "gate_up", "down")
"""The linears of a layer that adapters change."""


@dataclass(frozen=True, slots=True, eq=False)
class LowRanks:
    """The weights of an adapter."""

    pairs: Mapping[tuple[int, str], tuple[Tensor, Tensor]]
    """A and B by layer and linear."""
    table: Tensor
    """The same as a table for `Backend.add_low_rank`."""


class ComposedModel:
    """A `Model` on the device of its weights, composed of the backend's operations.

    If it is the part of one rank, `shard` says which part, and `collectives` are the exchanges with
    the other ranks, set before the first step. The final states are then the same on all ranks;
    only rank 0 gets the logits of all tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Backend,
        embedding: Tensor,
        layers: tuple[Layer, ...],
        final_norm: Tensor,
        head: Tensor | GroupedWeight,
        weights_digest: str,
    ) -> None:
        self.config = config
        self.dtype, self.device = embedding.dtype, embedding.device
        self.ops = ops
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.head = head
        self.weights_digest = weights_digest
        self.shard: Shard | None = None
        self.collectives: Collectives | None = None
        self._embedding_scale = embedding_scale(config, embedding.dtype)
        self._activate = (
            ops.gelu_mul if config.family.activation == "gelu_pytorch_tanh" else ops.silu_mul
        )
        self._rotations = {
            rope: tuple(table.to(embedding.device) for table in tables)
            for rope, tables in rope_tables(config).items()
        }

    @property
    def whole_config(self) -> ModelConfig:
        return self.config if self.shard is None else self.shard.config

    def load_adapter(self, files: AdapterFiles) -> LowRanks:
        def there(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
            return down.to(self.device, self.dtype), up.to(self.device, self.dtype)

        pairs = {
            (one.layer, one.site): there(*one.whole())
            for one in joined_adapters(files, self.whole_config, self.shard)
        }
        table = torch.zeros(len(self.layers) * len(_SITES), 3, dtype=torch.int64)
        for (layer, site), (down, up) in pairs.items():
            entry = torch.tensor([down.data_ptr(), up.data_ptr(), len(down)])
            table[layer * len(_SITES) + _SITES.index(site)] = entry
        return LowRanks(pairs, table.to(self.device))

    def forward(self, batch: Batch, kv: Tensor, wanted: Tensor) -> Tensor:
        """See `Model.forward`. The residual stream starts at 0; the output of each sublayer is
        added to it where the next one begins."""
        self.ops.clear_begun_blocks(kv, batch.slot_mapping)
        rotations = {
            rope: tuple(table[batch.positions] for table in tables)
            for rope, tables in self._rotations.items()
        }
        x = self._embed(batch.token_ids)
        residual = torch.zeros_like(x)
        for i, (layer, kv_layer) in enumerate(zip(self.layers, kv.unbind(dim=1), strict=True)):
            x = self._enter(x, residual, layer.attention_in)
            rotation = None if layer.rope is None else rotations[layer.rope]
            x = self._attention(i, layer, x, rotation, batch, kv_layer)
            x = self._leave(x, layer.attention_out)
            x = self._enter(x, residual, layer.mlp_in)
            x = self._leave(self._mlp(i, layer, x, batch), layer.mlp_out)
        return self._enter(x[wanted], residual[wanted], self.final_norm)

    def logits(self, hidden: Tensor) -> Tensor:
        if self.collectives is not None:
            self.collectives.begin_logits(hidden)
        logits = self.ops.linear(hidden, self.head)
        if self.collectives is not None:
            logits = self.collectives.join_logits(logits)
        logits, c = logits.float(), self.config
        if c.logit_scale != 1:
            logits = logits * c.logit_scale
        return logits if c.logit_cap is None else c.logit_cap * torch.tanh(logits / c.logit_cap)

    def draw(
        self, states: Tensor, batch: SamplingBatch, masks: Sequence[Mask | None]
    ) -> Sequence[Tensor]:
        return sampler.draw(self.logits(states), batch, masks)

    def score(self, states: Tensor, token_ids: Tensor, num_top: int) -> ScoreTensors:
        parts = zip(*(torch.split(x, LOGITS_AT_ONCE) for x in (states, token_ids)), strict=True)
        scores = [score_tensors(self.logits(part), ids, num_top) for part, ids in parts]
        told, logprobs, ranks = (torch.cat(columns) for columns in zip(*scores, strict=True))
        return told, logprobs, ranks

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self.collectives is None:
            x = self.embedding[token_ids]
        else:
            x = self.collectives.embed(self.embedding, token_ids)
        return x if self._embedding_scale == 1 else x * self._embedding_scale

    def _enter(self, x: Tensor, residual: Tensor, norm: Tensor | None) -> Tensor:
        """Add x to the residual stream. Returns the input of the next sublayer."""
        if norm is not None:
            return self.ops.add_rms_norm(x, residual, norm, self.config.rms_norm_eps)
        residual += x
        return residual

    def _leave(self, x: Tensor, norm: Tensor | None) -> Tensor:
        """Return what a sublayer adds to the residual stream."""
        if norm is not None:
            x = self.ops.rms_norm(x, norm, self.config.rms_norm_eps)
        return x if self.config.residual_scale == 1 else x * self.config.residual_scale

    def _sum(self, x: Tensor) -> Tensor:
        """Add up the outputs of a linear whose inputs are divided among the ranks."""
        return x if self.collectives is None else self.collectives.sum(x)

    def _attention(
        self,
        i: int,
        layer: Layer,
        x: Tensor,
        rotation: tuple[Tensor, ...] | None,
        batch: Batch,
        kv_layer: Tensor,
    ) -> Tensor:
        q, k, v = self._heads(self._linear(i, "qkv", layer.qkv, x, batch))
        norms: HeadNorms | None = None
        if layer.query_norm is not None and layer.key_norm is not None:
            norms = HeadNorms(layer.query_norm, layer.key_norm, self.config.rms_norm_eps)
        q = self.ops.store_heads(kv_layer, q, k, v, batch.slot_mapping, norms, rotation)
        attended = self.ops.paged_attention(
            q,
            kv_layer,
            batch.block_tables,
            batch.cu_query_lens,
            batch.context_lens,
            self.config.attention_scale,
            layer.window,
            max_query_len=batch.max_query_len,
            cap=self.config.attention_cap,
            sinks=layer.sinks,
        )
        return self._sum(self._linear(i, "output", layer.output, attended.flatten(1), batch))

    def _mlp(self, i: int, layer: Layer, x: Tensor, batch: Batch) -> Tensor:
        if layer.experts is not None:
            return self._sum(self.ops.experts(x, layer.experts))
        assert layer.gate_up is not None
        assert layer.down is not None
        joined = self._linear(i, "gate_up", layer.gate_up, x, batch)
        gated = self._activate(*joined.chunk(2, dim=-1))
        return self._sum(self._linear(i, "down", layer.down, gated, batch))

    def _linear(self, i: int, site: str, linear: Linear, x: Tensor, batch: Batch) -> Tensor:
        """Compute one linear of layer `i`, and what adapters add to it."""
        y = self.ops.linear(x, linear.weight, linear.bias)
        for run in batch.adapters:
            if (pair := run.adapter.pairs.get((i, site))) is not None:
                down, up = pair
                z = self.ops.linear(x[run.begin : run.end], down)
                y[run.begin : run.end] += self.ops.linear(z, up)
        if (tables := batch.tables) is not None:
            number = i * len(_SITES) + _SITES.index(site)
            self.ops.add_low_rank(y, x, tables.addresses, number, tables.max_rank)
        return y

    def _heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Return queries, keys and values as views [T, heads, head_dim] of [T, outputs of qkv]."""
        c = self.config
        heads = qkv.view(len(qkv), -1, c.head_dim)
        return torch.split(heads, [c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
