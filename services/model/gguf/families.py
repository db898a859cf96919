"""The architectures of GGUF files that are read, and their tensors."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from services.model.config.families import FAMILIES, Family
from services.model.config.layout import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    Shape,
    expert_linears,
    norm_places,
    weight_shapes,
)
from services.model.config.model_config import ModelConfig

_OUTSIDE_LAYERS = {EMBEDDING: "token_embd", FINAL_NORM: "output_norm", HEAD: "output"}
_NORMS = {
    "attention_in": "attn_norm",
    "query_norm": "attn_q_norm",
    "key_norm": "attn_k_norm",
    "attention_out": "post_attention_norm",
    "mlp_in": "ffn_norm",
    "mlp_out": "post_ffw_norm",
}
_IN_LAYERS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.sinks": "attn_sinks",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True, slots=True)
class GgufFamily:
    """An architecture of GGUF files, with the facts that these files lack and a config.json has."""

    architecture: str
    """The architecture in config.json."""
    with_experts: str | None = None
    """The architecture of files with `expert_count`."""
    pairs: bool = False
    """Whether llama.cpp stores the rows of queries and keys in its own order, in which the two
    halves of a rotation are neighbours."""
    period: int | None = None
    """All layers have a sliding window but each `period`-th; 0 if all have one, None if none
    may."""
    default_window: int | None = 0
    """The window of a file without `sliding_window`; 0 is none, and None refuses the file."""
    largest: int = 0
    """The number of layers of the family's largest model, which scales scores by hidden size /
    heads instead of the size of a head."""
    norms: Mapping[str, str] | None = None
    """The names of norms that other families name otherwise."""


GGUF_FAMILIES: Mapping[str, GgufFamily] = {
    "llama": GgufFamily("LlamaForCausalLM", "MixtralForCausalLM", pairs=True, period=0),
    "qwen2": GgufFamily("Qwen2ForCausalLM"),
    "qwen3": GgufFamily("Qwen3ForCausalLM"),
    "qwen3moe": GgufFamily("Qwen3MoeForCausalLM"),
    "gpt-oss": GgufFamily(
        "GptOssForCausalLM",
        period=2,
        default_window=None,
        norms={"mlp_in": "post_attention_norm"},
    ),
    "smollm3": GgufFamily("SmolLM3ForCausalLM", pairs=True),
    "olmo2": GgufFamily("Olmo2ForCausalLM"),
    "granite": GgufFamily("GraniteForCausalLM", pairs=True),
    "phi3": GgufFamily("Phi3ForCausalLM", period=0),
    "glm4": GgufFamily("Glm4ForCausalLM"),
    "gemma2": GgufFamily("Gemma2ForCausalLM", period=2, default_window=4096, largest=46),
    "gemma3": GgufFamily("Gemma3ForCausalLM", period=6, largest=62),
}


def stored_family(architecture: str) -> Family:
    """The family's row for GGUF files: weights of norms include the offset, and each expert has
    linears of its own (as parts of a tensor)."""
    family = FAMILIES[architecture]
    experts = family.experts and replace(family.experts, stacked=False)
    return replace(family, norm_offset=0.0, experts=experts)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor of a Hugging Face checkpoint is in a GGUF file: a tensor's name, and the
    expert in it; None if it is the whole tensor."""

    name: str
    expert: int | None = None


def tensor_places(config: ModelConfig, family: GgufFamily) -> dict[str, Place]:
    """The place of each tensor, by its name in Hugging Face checkpoints."""
    linears = _names_in_layers(config, family)
    found: dict[str, Place] = {}
    experts = _places_of_experts(config)
    for name in weight_shapes(config):
        stem, _, part = name.rpartition(".")
        if name in _OUTSIDE_LAYERS:
            found[name] = Place(f"{_OUTSIDE_LAYERS[name]}.weight")
        elif stem in experts:
            found[name] = replace(experts[stem], name=f"{experts[stem].name}.{part}")
        else:
            layer, _, rest = name.removeprefix("model.layers.").partition(".")
            stem, part = (rest, "weight") if rest in linears else rest.rsplit(".", 1)
            found[name] = Place(f"blk.{layer}.{linears[stem]}.{part}")
    return found


def _names_in_layers(config: ModelConfig, family: GgufFamily) -> dict[str, str]:
    names = {**_NORMS, **(family.norms or {})}
    norms = {name: names[at] for at, name in norm_places(config.family).items() if name is not None}
    return {**_IN_LAYERS, **norms}


def _places_of_experts(config: ModelConfig) -> dict[str, Place]:
    found: dict[str, Place] = {}
    for layer in range(config.num_layers):
        if (linears := expert_linears(config, layer)) is None:
            continue
        found[linears.router] = Place(f"blk.{layer}.ffn_gate_inp")
        kinds = {"gate": linears.gate, "up": linears.up, "down": linears.down}
        for kind, names in kinds.items():
            for expert, name in enumerate(names):
                found[name] = Place(f"blk.{layer}.ffn_{kind}_exps", expert)
    return found


def stored_shapes(config: ModelConfig, places: Mapping[str, Place]) -> dict[str, Shape]:
    """The shape of each tensor of a GGUF file with this config, by its name there."""
    shapes: dict[str, Shape] = {}
    for name, shape in weight_shapes(config).items():
        place = places[name]
        if place.expert is not None and config.experts is not None:
            shape = (config.experts.num, *shape)
        shapes[place.name] = shape
    return shapes
