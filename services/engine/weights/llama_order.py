"""Weights as Llama names and orders them, of checkpoints that have them otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvops.quantized import with_tensors
from services.engine.weights.weights import Form, Weight, Weights
from services.model.config.layout import FUSED, layer_prefix
from services.model.config.model_config import ModelConfig

Rows = slice | Tensor
"""Which rows of a stored linear are the outputs of one of Llama's, in order."""


def as_llama(stored: Weights, config: ModelConfig) -> Weights:
    """The weights with Llama's linears: fused ones are taken apart, and queries and keys have the
    two halves of a rotation one after the other. Weights of norms include the family's offset."""
    family = config.family
    if not (family.fused or family.interleaved or family.norm_offset):
        return stored
    places = {
        name: place
        for layer in range(config.num_layers)
        for name, place in _places(config, layer_prefix(layer)).items()
    }
    tensors = dict(stored.tensors)
    for name, (linear, rows) in places.items():
        if (bias := stored.tensors.get(f"{linear}.bias")) is not None:
            tensors[f"{name}.bias"] = bias[rows]
    for name, tensor in stored.tensors.items():
        if family.norm_offset and name.endswith("norm.weight"):
            tensors[name] = tensor.float() + family.norm_offset
    return _LlamaWeights(stored, tensors, places)


@dataclass(frozen=True, slots=True)
class _LlamaWeights:
    """The weights in Llama's order. `places` has the stored linear and its rows of each linear that
    differs."""

    stored: Weights
    tensors: Mapping[str, Tensor]
    places: Mapping[str, tuple[str, Rows]]

    def form(self, linear: str) -> Form:
        return self.stored.form(self.places.get(linear, (linear,))[0])

    def linear(self, linear: str) -> Weight:
        if linear not in self.places:
            return self.stored.linear(linear)
        name, rows = self.places[linear]
        return rows_of(self.stored.linear(name), rows)


def rows_of(weight: Weight, rows: Rows) -> Weight:
    if isinstance(weight, Tensor):
        return weight[rows]
    return with_tensors(weight, lambda name: getattr(weight, name)[rows])


def neighbours_apart(num_heads: int, head_dim: int, width: int) -> Tensor:
    """The rows that put the second of each two neighbours behind the first ones, within the first
    `width` rows of each head."""
    rows = torch.arange(num_heads * head_dim).view(num_heads, head_dim)
    pairs = rows[:, :width].view(num_heads, width // 2, 2)
    return torch.cat([pairs[:, :, 0], pairs[:, :, 1], rows[:, width:]], dim=1).flatten()


def _places(config: ModelConfig, prefix: str) -> dict[str, tuple[str, Rows]]:
    """The linears of a layer that are stored otherwise."""
    places: dict[str, tuple[str, Rows]] = {}
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    sizes = {"qkv_proj": (queries, keys, keys), "gate_up_proj": (config.intermediate_size,) * 2}
    for fused in config.family.fused:
        place, parts = FUSED[fused]
        begin = 0
        for part, size in zip(parts, sizes[fused], strict=True):
            stored = f"{prefix}.{place}.{fused}"
            places[f"{prefix}.{place}.{part}"] = (stored, slice(begin, begin + size))
            begin += size
    rope = config.ropes[0]
    if config.family.interleaved and rope is not None:
        width = rope.width or config.head_dim
        for part, num_heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
            name = f"{prefix}.self_attn.{part}"
            places[name] = (name, neighbours_apart(num_heads, config.head_dim, width))
    return places
