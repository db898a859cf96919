"""Fused weights: which weights of a checkpoint form one linear of the decoders, and in which
order their outputs follow each other."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from kvops.quantized import joined
from services.model.config.layout import EMBEDDING, HEAD, expert_linears, layer_prefix
from services.model.config.model_config import ModelConfig

HEAD_SECTION = "head"

COLUMNS = 16
"""Half of a panel's. Outputs of `gate` and `up` alternate in runs of this length: a panel has both
of a pair."""


@dataclass(frozen=True, slots=True)
class Section:
    """One linear [num_outputs, num_inputs] of the native decoder, which joins the weights `sources`
    along their outputs."""

    name: str
    sources: tuple[str, ...]
    num_outputs: int
    num_inputs: int
    turn: int = 0
    """The number of outputs of a source in turn; 0 if the sources follow one another."""
    is_exact: bool = False
    """Whether the section is fp32, even if the others are not."""

    def bias(self, weights: Mapping[str, Tensor]) -> Tensor | None:
        """The joined bias [num_outputs], or None if the checkpoint has none."""
        names = [f"{source}.bias" for source in self.sources]
        if not all(name in weights for name in names):
            return None
        parts = [weights[name] for name in names]
        return joined(parts, self.turn)


def layer_sections(config: ModelConfig, layer: int, turn: int = COLUMNS) -> dict[str, Section]:
    """The linears of a layer, by the names that decoders give them, without experts. `turn` is that
    of gate and up."""
    prefix, hidden = layer_prefix(layer), config.hidden_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    wide = -(-config.intermediate_size // max(1, turn)) * max(1, turn)

    def section(name: str, sources: str, outputs: int, inputs: int, turn: int = 0) -> Section:
        names = tuple(f"{prefix}.{source}" for source in sources.split())
        return Section(f"{layer}.{name}", names, outputs, inputs, turn)

    qkv, pair = "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "mlp.gate_proj mlp.up_proj"
    sections = {
        "qkv": section("qkv", qkv, q_size + 2 * kv_size, hidden),
        "output": section("output", "self_attn.o_proj", hidden, q_size),
    }
    if expert_linears(config, layer) is not None:
        return sections
    return sections | {
        "gate_up": section("gate_up", pair, 2 * wide, hidden, turn),
        "down": section("down", "mlp.down_proj", hidden, config.intermediate_size),
    }


@dataclass(frozen=True, slots=True)
class ExpertSections:
    router: Section
    gate_up: tuple[Section, ...]
    down: tuple[Section, ...]


def expert_sections(config: ModelConfig, layer: int) -> ExpertSections | None:
    """The linears of a layer's experts; None if the layer has an MLP."""
    linears, experts, hidden = expert_linears(config, layer), config.experts, config.hidden_size
    if linears is None or experts is None:
        return None
    wide, name = 2 * _padded(experts.width), f"{layer}.experts"
    pairs = zip(linears.gate, linears.up, strict=True)
    return ExpertSections(
        Section(f"{name}.router", (linears.router,), experts.num, hidden, is_exact=True),
        tuple(
            Section(f"{name}.{number}.gate_up", pair, wide, hidden, COLUMNS)
            for number, pair in enumerate(pairs)
        ),
        tuple(
            Section(f"{name}.{number}.down", (down,), hidden, experts.width)
            for number, down in enumerate(linears.down)
        ),
    )


def all_sections(config: ModelConfig) -> Iterator[Section]:
    """Every linear, in the order in which a step reads them."""
    for layer in range(config.num_layers):
        yield from layer_sections(config, layer).values()
        if (experts := expert_sections(config, layer)) is not None:
            yield from (experts.router, *experts.gate_up, *experts.down)
    head = (EMBEDDING if config.tied_embeddings else HEAD).removesuffix(".weight")
    yield Section(HEAD_SECTION, (head,), config.vocab_size, config.hidden_size)


def _padded(n: int) -> int:
    return -(-n // COLUMNS) * COLUMNS
