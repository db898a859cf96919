"""A decoder composed of the operations of `kvops`: that of Llama, plus the query and key norms of
Qwen3, the biases of Qwen2 and the sliding windows of Mistral if the checkpoint has them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kvops import Backend
from services.common.text.model_config import ModelConfig
from services.engine.batch import Answer, Fault, Query
from services.engine.models.model import Batch
from services.engine.models.rope import rope_tables
from services.engine.ranks.collectives import Collectives
from services.engine.sampling.sampling_head import answer_in_parts


@dataclass(frozen=True, slots=True)
class Linear:
    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class Layer:
    """The weights of one layer. `qkv` and `gate_up` are joined: their outputs follow one another.
    Only Qwen3 has `query_norm` and `key_norm`. `window`: how many positions a query attends to, its
    own included; None: all."""

    input_norm: Tensor
    qkv: Linear
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear
    window: int | None


class ComposedModel:
    """A `Model` on the device of its weights, composed of the backend's operations.

    `collectives`: None, or the exchanges with the other ranks if this is the shard of one rank; set
    before the first step. The final states are then the same on all ranks; only rank 0 gets the
    logits of all tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        ops: Backend,
        embedding: Tensor,
        layers: tuple[Layer, ...],
        final_norm: Tensor,
        head: Tensor,
        weights_digest: str,
    ) -> None:
        self.config = config
        self.ops = ops
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self.weights_digest = weights_digest
        self.collectives: Collectives | None = None
        tables = rope_tables(config.rope, config.head_dim, config.max_position_embeddings)
        self._cos, self._sin = (table.to(embedding.device) for table in tables)

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def device(self) -> torch.device:
        return self._embedding.device

    def forward(self, batch: Batch, kv: Tensor, wanted: Tensor) -> Tensor:
        """See `Model.forward`. The residual stream starts at 0; `add_rms_norm` adds the output of
        each sublayer to it, where the next one normalizes the stream."""
        ops, eps = self.ops, self.config.rms_norm_eps
        ops.clear_begun_blocks(kv, batch.slot_mapping)
        rotation = self._cos[batch.positions], self._sin[batch.positions]
        x = self._embed(batch.token_ids)
        residual = torch.zeros_like(x)
        for layer, kv_layer in zip(self._layers, kv.unbind(dim=1), strict=True):
            x = ops.add_rms_norm(x, residual, layer.input_norm, eps)
            x = self._attention(layer, x, rotation, batch, kv_layer)
            x = ops.add_rms_norm(x, residual, layer.mlp_norm, eps)
            x = self._mlp(layer, x)
        return ops.add_rms_norm(x[wanted], residual[wanted], self._final_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        logits = self.ops.linear(hidden, self._head)
        if self.collectives is not None:
            logits = self.collectives.join_logits(logits)
        return logits.float()

    def answer(self, hidden: Tensor, queries: Sequence[Query]) -> list[Answer | Fault]:
        return answer_in_parts(lambda states: self.logits(hidden[states]), queries)

    def _embed(self, token_ids: Tensor) -> Tensor:
        if self.collectives is None:
            return self._embedding[token_ids]
        return self.collectives.embed(self._embedding, token_ids)

    def _sum(self, x: Tensor) -> Tensor:
        """The output of a linear whose inputs are divided among the ranks."""
        return x if self.collectives is None else self.collectives.sum(x)

    def _attention(
        self,
        layer: Layer,
        x: Tensor,
        rotation: tuple[Tensor, Tensor],
        batch: Batch,
        kv_layer: Tensor,
    ) -> Tensor:
        ops, eps = self.ops, self.config.rms_norm_eps
        q, k, v = self._heads(self._linear(layer.qkv, x))
        if layer.query_norm is not None and layer.key_norm is not None:
            q = ops.rms_norm(q, layer.query_norm, eps)
            k = ops.rms_norm(k, layer.key_norm, eps)
        ops.rope(q, k, *rotation)
        ops.store_kv(kv_layer, k, v, batch.slot_mapping)
        attended = ops.paged_attention(
            q,
            kv_layer,
            batch.block_tables,
            batch.cu_query_lens,
            batch.context_lens,
            self.config.head_dim**-0.5,
            layer.window,
            max_query_len=batch.max_query_len,
        )
        return self._sum(self._linear(layer.output, attended.flatten(1)))

    def _mlp(self, layer: Layer, x: Tensor) -> Tensor:
        gated = self.ops.silu_mul(*self._linear(layer.gate_up, x).chunk(2, dim=-1))
        return self._sum(self._linear(layer.down, gated))

    def _linear(self, linear: Linear, x: Tensor) -> Tensor:
        return self.ops.linear(x, linear.weight, linear.bias)

    def _heads(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """[T, outputs of qkv] -> queries, keys and values, [T, heads, head_dim] each: views."""
        c = self.config
        heads = qkv.view(len(qkv), -1, c.head_dim)
        return torch.split(heads, [c.num_heads, c.num_kv_heads, c.num_kv_heads], dim=1)
