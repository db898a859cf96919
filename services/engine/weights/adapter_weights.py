"""Joins the weights of a LoRA adapter as the linears of the decoders are joined.

The linears of one section (such as q, k and v) have the same input x. Their A are stacked, and each
has a B that takes its own part of A x:

    y = W x + | B_q        | | A_q |
              |     B_k    | | A_k | x        the B of a linear without an adapter is zero
              |        B_v | | A_v |

A rank of several has the A of its inputs and the B of its outputs: the linear's own division
(`services.common.checkpoint.shards`). Where the inputs are divided, the ranks' B (A x) are added up
with the linears' own sums.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from services.common.checkpoint.adapter import AdapterFiles
from services.common.checkpoint.layout import weight_shapes
from services.common.checkpoint.shards import INPUTS, Shard, split_of
from services.common.text.model_config import ModelConfig
from services.engine.weights.fused_weights import Section, layer_sections

_RANKS = 16  # the joined rank is a multiple, which suits every kernel


@dataclass(frozen=True, slots=True)
class JoinedAdapter:
    """The addition to one section. `down`: [rank, K]. `ups`: of each source, [n, rank], times the
    adapter's scale. fp32."""

    layer: int
    site: str
    section: Section
    down: Tensor
    ups: list[Tensor]


def joined_adapters(
    files: AdapterFiles, config: ModelConfig, shard: Shard | None = None
) -> Iterator[JoinedAdapter]:
    """The additions of an adapter, section after section; those of `shard`, if that is not None.
    `config`: of the whole model. OSError, SafetensorError: the file is not readable any more."""
    from safetensors import (
        safe_open,
    )  # a check of a GPU imports this module, and has no safetensors

    shapes = weight_shapes(config)
    with safe_open(files.weights, framework="pt") as file:

        def side(linear: str, name: str) -> Tensor:
            tensor: Tensor = file.get_tensor(f"base_model.model.{linear}.lora_{name}.weight")
            return tensor.float()

        for layer in range(config.num_layers):
            for site, section in layer_sections(config, layer).items():
                ranks = [files.linears.get(source, 0) for source in section.sources]
                if not any(ranks):
                    continue
                rank = -(-sum(ranks) // _RANKS) * _RANKS
                down, ups, begin = torch.zeros(rank, section.num_inputs), [], 0
                for source, own in zip(section.sources, ranks, strict=True):
                    up = torch.zeros(shapes[f"{source}.weight"][0], rank)
                    if own:
                        down[begin : begin + own] = side(source, "A")
                        up[:, begin : begin + own] = side(source, "B") * files.scale
                    ups.append(up)
                    begin += own
                if shard is not None:
                    down, ups = _divided(section, down, ups, shard)
                yield JoinedAdapter(layer, site, section, down, ups)


def _divided(
    section: Section, down: Tensor, ups: list[Tensor], shard: Shard
) -> tuple[Tensor, list[Tensor]]:
    parts = []
    for source, up in zip(section.sources, ups, strict=True):
        split = split_of(f"{source}.weight")
        assert split is not None
        dimension, divided = split
        if dimension == INPUTS:
            return down[:, shard.part(divided)].contiguous(), ups
        parts.append(up[shard.part(divided)])
    return down, parts
