"""Joins the weights of a LoRA adapter as the linears of the decoders are joined.

The linears of one section (such as q, k and v) have the same input x. Their A are stacked, and each
has a B that takes its own part of A x:

    y = W x + | B_q        | | A_q |
              |     B_k    | | A_k | x        the B of a linear without an adapter is zero
              |        B_v | | A_v |
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from services.common.checkpoint.adapter import AdapterFiles
from services.common.checkpoint.layout import weight_shapes
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


def joined_adapters(files: AdapterFiles, config: ModelConfig) -> Iterator[JoinedAdapter]:
    """The additions of an adapter, section after section. OSError, SafetensorError: the file is not
    readable any more."""
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
                yield JoinedAdapter(layer, site, section, down, ups)
