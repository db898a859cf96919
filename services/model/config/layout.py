"""Names and shapes of a checkpoint's tensors.

A family's row says how its norms are called, and which linears are fused in the checkpoint; for the
rest, families use Llama's names.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from services.model.config.families import Family
from services.model.config.model_config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"
SCORE_HEAD = "score.weight"

Shape = tuple[int, ...]

FUSED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "qkv_proj": ("self_attn", ("q_proj", "k_proj", "v_proj")),
    "gate_up_proj": ("mlp", ("gate_proj", "up_proj")),
}
"""Linears that are several of Llama's, whose outputs follow one another: where they are, and the
names of these."""


def layer_prefix(layer: int) -> str:
    return f"model.layers.{layer}"


def norm_places(family: Family) -> dict[str, str | None]:
    """The names of a layer's norms in the checkpoint, by the names that the decoders give them."""
    norms, has_qk_norm = family.norms, family.qk_norm != "none"
    return {
        "attention_in": norms.attention_in,
        "query_norm": "self_attn.q_norm" if has_qk_norm else None,
        "key_norm": "self_attn.k_norm" if has_qk_norm else None,
        "attention_out": norms.attention_out,
        "mlp_in": norms.mlp_in,
        "mlp_out": norms.mlp_out,
    }


def weight_shapes(config: ModelConfig) -> dict[str, Shape]:
    """The shape of each tensor that a checkpoint with this config must have, by name."""
    shapes: dict[str, Shape] = {
        EMBEDDING: (config.vocab_size, config.hidden_size),
        FINAL_NORM: (config.hidden_size,),
    }
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, config.hidden_size)
    if config.is_cross_encoder:
        shapes[SCORE_HEAD] = (1, config.hidden_size)
    for layer in range(config.num_layers):
        for name, shape in _layer_shapes(config, layer).items():
            shapes[f"{layer_prefix(layer)}.{name}"] = shape
        shapes |= _expert_shapes(config, layer)
    return shapes


def ignored_weights(config: ModelConfig) -> frozenset[str]:
    """Tensors that a checkpoint may contain although they are not used: some checkpoints with tied
    embeddings contain the head too."""
    return frozenset({HEAD}) if config.tied_embeddings else frozenset()


@dataclass(frozen=True, slots=True)
class ExpertLinears:
    """The names of a layer's router, and of each expert's linears, without `.weight`."""

    router: str
    gate: tuple[str, ...]
    up: tuple[str, ...]
    down: tuple[str, ...]


def expert_linears(config: ModelConfig, layer: int) -> ExpertLinears | None:
    """None if the layer has an MLP."""
    experts, names = config.experts, config.family.experts
    if experts is None or names is None or not experts.layers[layer]:
        return None
    place = expert_place(config, layer)
    gate, up, down = (
        tuple(f"{place}.experts.{number}.{name}" for number in range(experts.num))
        for name in (names.gate, names.up, names.down)
    )
    return ExpertLinears(f"{place}.{names.router}", gate, up, down)


def expert_place(config: ModelConfig, layer: int) -> str:
    assert config.family.experts is not None
    return f"{layer_prefix(layer)}.{config.family.experts.place}"


def is_stacked_experts(name: str) -> bool:
    """Whether the tensor has the weights of all experts of a layer."""
    return name.endswith((".experts.gate_up_proj", ".experts.down_proj"))


def _stacked_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    experts, hidden, place = config.experts, config.hidden_size, expert_place(config, layer)
    assert experts is not None
    num, wide = experts.num, 2 * experts.width
    return {
        f"{place}.router.weight": (num, hidden),
        f"{place}.router.bias": (num,),
        f"{place}.experts.gate_up_proj": (num, hidden, wide),
        f"{place}.experts.gate_up_proj_bias": (num, wide),
        f"{place}.experts.down_proj": (num, experts.width, hidden),
        f"{place}.experts.down_proj_bias": (num, hidden),
    }


def _expert_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    experts, linears, hidden = config.experts, expert_linears(config, layer), config.hidden_size
    if experts is None or linears is None:
        return {}
    if config.family.experts is not None and config.family.experts.stacked:
        return _stacked_shapes(config, layer)
    inner = dict.fromkeys((*linears.gate, *linears.up), (experts.width, hidden))
    outer = dict.fromkeys(linears.down, (hidden, experts.width))
    shapes: dict[str, Shape] = {linears.router: (experts.num, hidden), **inner, **outer}
    weights = {f"{name}.weight": shape for name, shape in shapes.items()}
    if config.family.experts is None or not config.family.experts.biases:
        return weights
    return weights | {f"{name}.bias": shape[:1] for name, shape in shapes.items()}


def _layer_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    hidden, wide = config.hidden_size, config.intermediate_size
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    linears = {
        "self_attn.q_proj": (q_size, hidden, config.qkv_bias),
        "self_attn.k_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.v_proj": (kv_size, hidden, config.qkv_bias),
        "self_attn.o_proj": (hidden, q_size, config.o_bias),
        "mlp.gate_proj": (wide, hidden, config.mlp_bias),
        "mlp.up_proj": (wide, hidden, config.mlp_bias),
        "mlp.down_proj": (hidden, wide, config.mlp_bias),
    }
    if expert_linears(config, layer) is not None:
        linears = {name: row for name, row in linears.items() if not name.startswith("mlp.")}
    for name in config.family.fused:
        place, parts = FUSED[name]
        rows = sum(linears.pop(f"{place}.{part}")[0] for part in parts)
        linears[f"{place}.{name}"] = (rows, hidden, False)
    whole = config.family.qk_norm == "all heads"
    widths = {"query_norm": q_size, "key_norm": kv_size} if whole else {}
    shapes: dict[str, Shape] = {}
    for at, norm in norm_places(config.family).items():
        if norm is not None:
            usual = config.head_dim if at in ("query_norm", "key_norm") else hidden
            shapes[f"{norm}.weight"] = (widths.get(at, usual),)
    if config.family.sinks:
        shapes["self_attn.sinks"] = (config.num_heads,)
    for name, (rows, columns, bias) in linears.items():
        shapes[f"{name}.weight"] = (rows, columns)
        if bias:
            shapes[f"{name}.bias"] = (rows,)
    return shapes
