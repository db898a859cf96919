"""What the native decoder's linears are made of: which weights of a checkpoint are computed in one,
and in which order their outputs lie."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from services.common.text.model_config import ModelConfig
from services.engine.models.layout import EMBEDDING, HEAD, layer_prefix

GATE_UP_COLUMNS = 16
"""`gate` and `up` alternate by this many outputs, so that one panel has both of a pair."""

Join = Callable[[list[Tensor]], Tensor]


@dataclass(frozen=True, slots=True)
class Section:
    """One linear [num_outputs, num_inputs]: `sources`, joined along the outputs."""

    name: str
    sources: tuple[str, ...]
    num_outputs: int
    num_inputs: int
    join: Join = torch.cat

    def weight(self, weights: Mapping[str, Tensor]) -> Tensor:
        """[num_outputs, num_inputs]."""
        return self._joined([weights[f"{source}.weight"] for source in self.sources])

    def bias(self, weights: Mapping[str, Tensor]) -> Tensor | None:
        """[num_outputs], or None where the checkpoint has none."""
        names = [f"{source}.bias" for source in self.sources]
        if not all(name in weights for name in names):
            return None
        return self._joined([weights[name] for name in names])

    def _joined(self, parts: list[Tensor]) -> Tensor:
        return parts[0] if len(parts) == 1 else self.join(parts)


def layer_sections(config: ModelConfig, layer: int) -> dict[str, Section]:
    """By the names that the native decoder gives them."""
    prefix, hidden = layer_prefix(layer), config.hidden_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    wide = _padded(config.intermediate_size)

    def section(name: str, sources: str, outputs: int, inputs: int, join: Join) -> Section:
        names = tuple(f"{prefix}.{source}" for source in sources.split())
        return Section(f"{layer}.{name}", names, outputs, inputs, join)

    qkv = "self_attn.q_proj self_attn.k_proj self_attn.v_proj"
    return {
        "qkv": section("qkv", qkv, q_size + 2 * kv_size, hidden, torch.cat),
        "output": section("output", "self_attn.o_proj", hidden, q_size, torch.cat),
        "gate_up": section("gate_up", "mlp.gate_proj mlp.up_proj", 2 * wide, hidden, alternated),
        "down": section("down", "mlp.down_proj", hidden, config.intermediate_size, torch.cat),
    }


def head_section(config: ModelConfig) -> Section:
    source = EMBEDDING if config.tied_embeddings else HEAD
    return Section("head", (source.removesuffix(".weight"),), config.vocab_size, config.hidden_size)


def all_sections(config: ModelConfig) -> Iterator[Section]:
    """Every linear, in the order in which a step reads them."""
    for layer in range(config.num_layers):
        yield from layer_sections(config, layer).values()
    yield head_section(config)


def alternated(pair: list[Tensor]) -> Tensor:
    """[n, ...] twice -> [2 * n padded to 16, ...]: 16 of the first, 16 of the second, and so on;
    what is behind n is 0."""
    padded = []
    for part in pair:
        whole = part.new_zeros((_padded(part.shape[0]), *part.shape[1:]))
        whole[: part.shape[0]] = part
        padded.append(whole.view(-1, GATE_UP_COLUMNS, *part.shape[1:]))
    return torch.stack(padded, dim=1).flatten(0, 2)


def _padded(n: int) -> int:
    return -(-n // GATE_UP_COLUMNS) * GATE_UP_COLUMNS
