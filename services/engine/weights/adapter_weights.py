"""Joins the weights of a LoRA adapter as the linears of the decoders are joined.

The linears of one section (such as q, k and v) have the same input x. Their A are stacked, and each
has a B that takes its own part of A x:

    y = W x + | B_q        | | A_q |
              |     B_k    | | A_k | x
              |        B_v | | A_v |

The parts have the same number of ranks; A and B end with zeros. A linear without an adapter has no
part of A x: its B is zero.

A rank of several has the A of its inputs and the B of its outputs: the linear's own division
(`services.model.checkpoint.shards`). Where the inputs are divided, the ranks' B (A x) are added up
with the linears' own sums.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from services.engine.weights.fused_weights import Section, layer_sections
from services.model.checkpoint.adapter import AdapterFiles
from services.model.checkpoint.shards import INPUTS, Shard, split_of
from services.model.config.layout import weight_shapes
from services.model.config.model_config import ModelConfig

_RANKS = 4  # of a part: a multiple, which suits the native kernels
_WHOLE_RANKS = 16  # of a whole adapter: a multiple, which suits every device


def largest_rank(max_lora_rank: int) -> int:
    """The most ranks that the A of a section has if adapters have up to `max_lora_rank`: q, k and v
    have a part each."""
    ranks = 3 * (-(-max_lora_rank // _RANKS) * _RANKS)
    return -(-ranks // _WHOLE_RANKS) * _WHOLE_RANKS


@dataclass(frozen=True, slots=True)
class JoinedAdapter:
    """The addition to one section."""

    layer: int
    site: str
    section: Section
    down: Tensor  # fp32 [rank, K]
    ups: list[Tensor]
    """The matrices [n, ranks of a part] of the sources, times the adapter's scale, fp32."""
    firsts: list[int]
    """The first rank of each source's part."""

    def whole(self) -> tuple[Tensor, Tensor]:
        """A and one B, which has zeros where the ranks belong to another source."""
        rank = -(-len(self.down) // _WHOLE_RANKS) * _WHOLE_RANKS
        pairs = zip(self.ups, self.firsts, strict=True)
        up = torch.cat([pad(up, (at, rank - at - up.shape[1])) for up, at in pairs])
        return pad(self.down, (0, 0, 0, rank - len(self.down))), up


def joined_adapters(
    files: AdapterFiles, config: ModelConfig, shard: Shard | None = None
) -> Iterator[JoinedAdapter]:
    """Return the additions of an adapter, section after section, or the part of `shard` if that is
    not None. `config` is the whole model's. Raises OSError or SafetensorError if the file is not
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
                parts = [files.linears.get(source) for source in section.sources]
                if not any(parts):
                    continue
                rank = max(part.rank for part in parts if part)
                rank = -(-rank // _RANKS) * _RANKS
                downs: list[Tensor] = []
                ups, firsts = [], []
                for source, part in zip(section.sources, parts, strict=True):
                    up = torch.zeros(shapes[f"{source}.weight"][0], rank)
                    firsts.append(rank * len(downs) if part else 0)
                    if part:
                        up[:, : part.rank] = side(source, "B") * part.scale
                        downs.append(pad(side(source, "A"), (0, 0, 0, rank - part.rank)))
                    ups.append(up)
                down = torch.cat(downs)
                if shard is not None:
                    down, ups = _divided(section, down, ups, shard)
                yield JoinedAdapter(layer, site, section, down, ups, firsts)


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
