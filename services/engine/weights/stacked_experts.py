"""Weights of checkpoints that have the experts of a layer in one tensor, as one linear for each.

    gate_up_proj   [E, hidden, 2 * width]: outputs of gate and up alternate, also in the bias
    down_proj      [E, width, hidden]

MXFP4 has two tensors instead of each: `_blocks` [E, outputs, groups, 16], two codes of four bits in
a byte, the first in its low bits; and `_scales` [E, outputs, groups], the exponents of groups of 32
inputs.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from kvops.fp4 import Float4Weight
from services.engine.weights.weights import Form, Weight, Weights
from services.model.config.layout import expert_linears, expert_place
from services.model.config.model_config import ModelConfig

Place = tuple[str, int, slice]
"""The stacked tensor of a linear, its expert, and its outputs there."""


def with_single_experts(stored: Weights, config: ModelConfig) -> Weights:
    """The weights with a linear for each expert."""
    if config.family.experts is None or not config.family.experts.stacked:
        return stored
    places = {
        name: place for layer in range(config.num_layers) for name, place in _places(config, layer)
    }
    biases = {
        f"{name}.bias": stored.tensors[f"{stack}_bias"][expert, outputs]
        for name, (stack, expert, outputs) in places.items()
    }
    return _SingleExperts(stored, {**stored.tensors, **biases}, places)


def _places(config: ModelConfig, layer: int) -> list[tuple[str, Place]]:
    linears, place = expert_linears(config, layer), f"{expert_place(config, layer)}.experts"
    assert linears is not None
    kinds = (
        (linears.gate, "gate_up_proj", slice(0, None, 2)),
        (linears.up, "gate_up_proj", slice(1, None, 2)),
        (linears.down, "down_proj", slice(None)),
    )
    return [
        (name, (f"{place}.{stack}", expert, outputs))
        for names, stack, outputs in kinds
        for expert, name in enumerate(names)
    ]


@dataclass(frozen=True, slots=True)
class _SingleExperts:
    stored: Weights
    tensors: Mapping[str, Tensor]
    places: Mapping[str, Place]

    def form(self, linear: str) -> Form:
        if linear not in self.places:
            return self.stored.form(linear)
        return "mxfp4" if f"{self.places[linear][0]}_blocks" in self.tensors else "float"

    def linear(self, linear: str) -> Weight:
        if linear not in self.places:
            return self.stored.linear(linear)
        stack, expert, outputs = self.places[linear]
        blocks = self.tensors.get(f"{stack}_blocks")
        if blocks is None:
            return self.tensors[stack][expert].T[outputs].contiguous()
        blocks, scales = blocks[expert, outputs], self.tensors[f"{stack}_scales"][expert, outputs]
        codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(1)
        return Float4Weight(codes, scales)
