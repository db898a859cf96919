"""Reads how many experts the layers of a model have, and how many of them compute a token."""

from dataclasses import dataclass, replace

from services.model.config.families import ExpertNames, Family
from services.model.config.json_fields import JsonFields


@dataclass(frozen=True, slots=True)
class ExpertConfig:
    """The experts of a model's layers."""

    num: int
    top_k: int
    width: int
    """The inner dimension of an expert."""
    normalizes: bool
    """Whether the weights of a token's experts are divided by their sum."""
    layers: tuple[bool, ...]
    """Whether each layer has experts; a layer without experts has an MLP."""
    alpha: float = 0.0
    limit: float = 0.0
    """The bound of `kvops.experts.ExpertWeights.swiglu`, with `alpha`; 0 is SiLU."""


def read_experts(config: JsonFields, family: Family, num_layers: int) -> ExpertConfig | None:
    """None if the family has no experts."""
    names = family.experts
    if names is None:
        return None
    num, top_k = _number(config, names), config.integer("num_experts_per_tok")
    if top_k > num:
        raise config.wrong("num_experts_per_tok", f"{top_k} of {num} experts")
    normalizes = names.normalizes
    if normalizes is None:
        normalizes = config.boolean("norm_topk_prob", default=False)
    layers = _layers(config, num_layers) if names.some_layers else (True,) * num_layers
    found = ExpertConfig(num, top_k, config.integer(names.width), normalizes, layers)
    if not names.swiglu:
        return found
    alpha, limit = config.number("swiglu_alpha"), config.number("swiglu_limit")
    return replace(found, alpha=alpha, limit=limit)


def _number(config: JsonFields, names: ExpertNames) -> int:
    """The value of whichever field is there. transformers has had several names for one."""
    given = [name for name in names.numbers if config.has(name)] or [names.numbers[0]]
    numbers = {config.integer(name, names.number) for name in given}
    if len(numbers) > 1:
        raise config.wrong(given[0], f"differs from {given[1]}")
    return numbers.pop()


def _layers(config: JsonFields, num_layers: int) -> tuple[bool, ...]:
    step = config.integer("decoder_sparse_step", 1)
    dense = config.value("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        raise config.wrong("mlp_only_layers", f"{dense!r} is not a list of layers")
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(num_layers))
