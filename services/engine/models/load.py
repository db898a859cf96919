"""Loads a model from a checkpoint directory."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from kvops import Backend
from kvops.experts import ExpertWeights
from services.common.checkpoint.layout import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    expert_linears,
    layer_prefix,
    norm_places,
)
from services.common.checkpoint.quantization import Quantization
from services.common.checkpoint.shards import shards
from services.common.errors import StartupError
from services.common.text.model_config import ModelConfig
from services.engine.models.decoder import ComposedModel, Layer, Linear
from services.engine.models.fused import load_fused
from services.engine.models.model import Model
from services.engine.weights.checkpoint import load_weights, weights_digest
from services.engine.weights.fused_weights import Section, layer_sections
from services.engine.weights.packed_file import Progress
from services.engine.weights.placement import Placement, SharedWeights, private
from services.engine.weights.sharded import ShardedWeights
from services.engine.weights.weights import Weights


def load_model(
    directory: Path | str,
    dtype: torch.dtype,
    backend: Backend,
    *,
    device: str = "cpu",
    quantize: Quantization | None = None,
    cache: Path | None = None,
    context: int | None = None,
    progress: Progress = lambda: None,
    shared: SharedWeights | None = None,
) -> Model:
    """Load the checkpoint's decoder, to compute in `dtype` (bf16 or fp32) on `backend`, with its
    weights on `device`, such as "cuda".

    `quantize`: quantize the weights of the linears. `cache`: a directory for packed weights, which
    the next start and the other workers of this host reuse; None: each process packs its own.
    `context`: the most positions of a request, see `ModelConfig.for_context`.
    `progress` is called several times a second; an exception that it raises ends the loading.
    `shared`: one copy of the weights for all workers on the device; None: a copy of its own.

    StartupError: the configuration, a weight or the quantization is wrong or not supported.
    """
    directory = Path(directory)
    config = ModelConfig.from_directory(directory).for_context(context)
    if backend.native is not None:
        return load_fused(directory, config, dtype, quantize, backend.native, cache, progress)
    if quantize:
        raise StartupError(f"backend {backend.name!r} has no {quantize} kernels; 'cpu' has")
    weights = load_weights(directory, config)
    digest = weights_digest(directory, progress)

    def load(place: Placement) -> ComposedModel:
        return _composed(directory, config, weights, digest, backend, place)

    return _placed(load, f"{digest} {config}", dtype, device, shared)


def load_shard(
    directory: Path,
    dtype: torch.dtype,
    backend: Backend,
    device: str,
    rank: int,
    size: int,
    context: int | None = None,
    progress: Progress = lambda: None,
    shared: SharedWeights | None = None,
) -> ComposedModel:
    """Load the part of rank `rank` of `size`; see `load_model`. The caller sets `collectives`."""
    config = ModelConfig.from_directory(directory).for_context(context)
    shard = shards(config, size)[rank]
    weights = ShardedWeights(load_weights(directory, config), shard)
    digest = weights_digest(directory, progress) if shared or rank == 0 else ""

    def load(place: Placement) -> ComposedModel:
        return _composed(directory, shard.own_config, weights, digest, backend, place)

    return _placed(load, f"{digest} {config} {rank}/{size}", dtype, device, shared)


def _placed(
    load: Callable[[Placement], ComposedModel],
    content: str,
    dtype: torch.dtype,
    device: str,
    shared: SharedWeights | None,
) -> ComposedModel:
    """`content`: what the weights depend on, besides `dtype`."""
    if shared is None:
        return load(private(device, dtype))
    return shared.load(xxhash.xxh3_128_hexdigest(content.encode()), dtype, load)


def _composed(
    directory: Path,
    config: ModelConfig,
    weights: Weights,
    digest: str,
    backend: Backend,
    place: Placement,
) -> ComposedModel:

    if config.experts is not None and backend.device != "cpu":
        raise StartupError(
            f"{directory}: {config.architecture} has experts, which backend {backend.name!r} does "
            "not compute; 'cpu' and 'reference' do"
        )

    def norm(name: str) -> Tensor:
        weight = weights.tensors[f"{name}.weight"]
        if config.family.norm_offset:  # of which bf16 would keep too few bits
            return weight.to(embedding.device)
        return place(lambda: [weight])

    def matrix(name: str) -> Tensor:
        weight = weights.linear(name)
        if not isinstance(weight, Tensor):
            form = weights.form(name)
            raise StartupError(f"{directory}: backend {backend.name!r} has no {form} kernels")
        return weight

    def linear(section: Section) -> Linear:
        weight = place(lambda: [matrix(source) for source in section.sources])
        bias = section.bias(weights.tensors)
        return Linear(weight, None if bias is None else place(lambda: [bias]))

    def experts(number: int) -> ExpertWeights | None:
        names, c = expert_linears(config, number), config.experts
        if names is None or c is None:
            return None
        pairs = [name for pair in zip(names.gate, names.up, strict=True) for name in pair]

        def biases(linears: Sequence[str]) -> Tensor | None:
            found = [weights.tensors.get(f"{linear}.bias") for linear in linears]
            some = [bias for bias in found if bias is not None]
            return torch.cat(some).view(c.num, -1) if len(some) == len(found) else None

        gate_up = place(lambda: [matrix(name) for name in pairs])
        down = place(lambda: [matrix(name) for name in names.down])
        return ExpertWeights(
            weights.tensors[f"{names.router}.weight"].float(),
            gate_up.view(c.num, -1, config.hidden_size),
            down.view(c.num, config.hidden_size, -1),
            c.top_k,
            c.normalizes,
            weights.tensors.get(f"{names.router}.bias"),
            *(biases(pairs), biases(names.down)),
            c.alpha,
            c.limit,
        )

    def sinks(number: int) -> Tensor | None:
        found = weights.tensors.get(f"{layer_prefix(number)}.self_attn.sinks")
        return None if found is None else found.float()

    def layer(number: int) -> Layer:
        prefix = layer_prefix(number)
        parts: dict[str, Any] = {
            at: None if name is None else norm(f"{prefix}.{name}")
            for at, name in norm_places(config.family).items()
        }
        parts |= {
            name: linear(replace(section, turn=0))
            for name, section in layer_sections(config, number).items()
        }
        parts |= {"experts": experts(number), "sinks": sinks(number)}
        return Layer(window=config.windows[number], rope=config.ropes[number], **parts)

    embedding = place(lambda: [weights.tensors[EMBEDDING]])
    return ComposedModel(
        config=config,
        ops=backend,
        embedding=embedding,
        layers=tuple(layer(number) for number in range(config.num_layers)),
        final_norm=norm(FINAL_NORM.removesuffix(".weight")),
        head=embedding
        if config.tied_embeddings
        else place(lambda: [matrix(HEAD.removesuffix(".weight"))]),
        weights_digest=digest,
    )
