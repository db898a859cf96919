"""Loads a model from a checkpoint directory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor

from kvops import Backend
from kvops.experts import ExpertWeights
from kvops.grouped import GroupedWeight, like, pack
from kvops.quantized import Kind, group_of
from services.engine.models.decoder import ComposedModel, Layer, Linear
from services.engine.models.fused import load_fused
from services.engine.models.model import Model
from services.engine.weights.checkpoint import load_weights, weights_digest
from services.engine.weights.dequantized import DequantizedWeights
from services.engine.weights.fused_weights import (
    HEAD_SECTION,
    Section,
    all_sections,
    expert_sections,
    layer_sections,
)
from services.engine.weights.kinds import packable, section_kinds
from services.engine.weights.packed_file import Progress
from services.engine.weights.placement import Placement, SharedWeights, private
from services.engine.weights.sharded import ShardedWeights
from services.engine.weights.weights import Weights
from services.model.checkpoint.reading import read_model_config
from services.model.checkpoint.shards import shards
from services.model.config.layout import (
    EMBEDDING,
    FINAL_NORM,
    expert_linears,
    layer_prefix,
    norm_places,
)
from services.model.config.model_config import ModelConfig
from services.model.config.quantization import FLOAT_KINDS, Quantization


def load_model(
    directory: Path | str,
    dtype: torch.dtype,
    backend: Backend,
    *,
    device: str = "cpu",
    quantize: Quantization | None = None,
    dequantize: bool = False,
    cache: Path | None = None,
    context: int | None = None,
    progress: Progress = lambda: None,
    shared: SharedWeights | None = None,
) -> Model:
    """Load the checkpoint's decoder, to compute in `dtype` (bf16 or fp32) on `backend`, with its
    weights on `device`, such as "cuda".

    `quantize` quantizes the weights of the linears; `dequantize` serves linears that the checkpoint
    has quantized in floating point. `cache` is a directory for packed weights, which the next start
    and the other workers of this host reuse; without it each process packs its own. `context` is
    the most positions of a request (`ModelConfig.for_context`). `progress` is called several times
    a second; an exception that it raises ends the loading. `shared` has one copy of the weights for
    all workers on the device; without it the model has a copy of its own.

    Raises StartupError if the configuration, a weight or the quantization is wrong or not
    supported.
    """
    directory = Path(directory)
    config = read_model_config(directory).for_context(context)
    weights = load_weights(directory, config, dtype)
    if dequantize:
        weights = DequantizedWeights(weights)
    elif backend.native is not None or quantize:
        weights = DequantizedWeights(weights, FLOAT_KINDS)
    if backend.native is not None:
        return load_fused(
            directory, config, weights, dtype, quantize, backend.native, cache, progress
        )
    kinds = section_kinds(list(all_sections(config)), weights, dtype, quantize)
    digest = weights_digest(directory, progress)

    def load(place: Placement) -> ComposedModel:
        return _composed(directory, config, weights, digest, backend, place, kinds)

    return _placed(load, f"{digest} {config} {kinds}", dtype, device, shared)


def load_shard(
    directory: Path,
    dtype: torch.dtype,
    backend: Backend,
    device: str,
    rank: int,
    size: int,
    quantize: Quantization | None = None,
    dequantize: bool = False,
    context: int | None = None,
    progress: Progress = lambda: None,
    shared: SharedWeights | None = None,
) -> ComposedModel:
    """Load the part of rank `rank` of `size`; see `load_model`. The caller sets `collectives`.
    Native kernels compute a part in floating point, and so does every backend the head."""
    config = read_model_config(directory).for_context(context)
    shard = shards(config, size)[rank]
    whole = load_weights(directory, config, dtype)
    if dequantize or backend.native is not None:
        whole = DequantizedWeights(whole)
    elif quantize:
        whole = DequantizedWeights(whole, FLOAT_KINDS)
    weights = ShardedWeights(whole, shard)
    kinds = section_kinds(list(all_sections(shard.own_config)), weights, dtype, quantize)
    del kinds[HEAD_SECTION]
    digest = weights_digest(directory, progress) if shared or rank == 0 else ""

    def load(place: Placement) -> ComposedModel:
        model = _composed(directory, shard.own_config, weights, digest, backend, place, kinds)
        model.shard = shard
        return model

    return _placed(load, f"{digest} {config} {kinds} {rank}/{size}", dtype, device, shared)


def _placed(
    load: Callable[[Placement], ComposedModel],
    content: str,
    dtype: torch.dtype,
    device: str,
    shared: SharedWeights | None,
) -> ComposedModel:
    """Load the weights to their place. `content` names what they depend on besides `dtype`."""
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
    kinds: Mapping[str, Kind],
) -> ComposedModel:
    """`kinds` has the kind of each quantized section; all others are in floating point."""
    embedding = place(lambda: [weights.tensors[EMBEDDING]])
    parts = _Parts(directory, config, weights, backend.name, place, embedding.device, kinds)
    *_, head = all_sections(config)
    is_shared = config.tied_embeddings and parts.kind(head) is None
    return ComposedModel(
        config=config,
        ops=backend,
        embedding=embedding,
        layers=tuple(parts.layer(number) for number in range(config.num_layers)),
        final_norm=parts.norm(FINAL_NORM.removesuffix(".weight")),
        head=embedding if is_shared else parts.weight(head, parts.kind(head)),
        weights_digest=digest,
    )


@dataclass(frozen=True)
class _Parts:
    """Reads the parts of a model's layers. Errors name `directory` and `backend`."""

    directory: Path
    config: ModelConfig
    weights: Weights
    backend: str
    place: Placement
    device: torch.device
    kinds: Mapping[str, Kind]

    def layer(self, number: int) -> Layer:
        config, prefix = self.config, layer_prefix(number)
        norms = {
            at: None if name is None else self.norm(f"{prefix}.{name}")
            for at, name in norm_places(config.family).items()
        }
        linears = {
            name: self._linear(section)
            for name, section in layer_sections(config, number, turn=0).items()
        }
        sinks = self.weights.tensors.get(f"{prefix}.self_attn.sinks")
        parts: dict[str, Any] = {**norms, **linears}
        return Layer(
            window=config.windows[number],
            rope=config.ropes[number],
            experts=self._experts(number),
            sinks=self._in_fp32(sinks),
            **parts,
        )

    def norm(self, name: str) -> Tensor:
        weight = self.weights.tensors[f"{name}.weight"]
        if self.config.family.norm_offset:  # bf16 would keep too few bits of weight + offset
            return weight.to(self.device)
        return self.place(lambda: [weight])

    def _in_fp32(self, weight: Tensor | None) -> Tensor | None:
        return None if weight is None else weight.to(self.device, torch.float32)

    def kind(self, *sections: Section) -> Kind | None:
        """The kind of the sections, or None if they are in floating point or of several kinds."""
        kinds = {self.kinds.get(section.name) for section in sections}
        kind = kinds.pop() if len(kinds) == 1 else None
        return kind if kind and group_of(kind) else None

    def weight(self, section: Section, kind: Kind | None) -> Tensor | GroupedWeight:
        if kind is None:
            return self.place(lambda: [self._matrix(source) for source in section.sources])
        num_inputs = section.num_inputs

        @cache
        def packed() -> GroupedWeight:
            parts = [self.weights.linear(source) for source in section.sources]
            return pack(kind, packable(kind, parts))

        tensors = {
            name: self.place(partial(lambda name: [getattr(packed(), name)], name), wanted)
            for name, wanted in like(kind, section.num_outputs, num_inputs).items()
        }
        return GroupedWeight(kind, num_inputs, **tensors)

    def _matrix(self, name: str) -> Tensor:
        weight = self.weights.linear(name)
        return weight if isinstance(weight, Tensor) else weight.dequantized()

    def _linear(self, section: Section) -> Linear:
        weight = self.weight(section, self.kind(section))
        bias = section.bias(self.weights.tensors)
        return Linear(weight, None if bias is None else self.place(lambda: [bias]))

    def _experts(self, number: int) -> ExpertWeights | None:
        names, c = expert_linears(self.config, number), self.config.experts
        if names is None or c is None:
            return None
        sections = expert_sections(self.config, number)
        assert sections is not None
        pairs = [name for pair in zip(names.gate, names.up, strict=True) for name in pair]
        hidden, width = self.config.hidden_size, c.width
        gate_up, down = (
            self.weight(Section(name, tuple(sources), c.num * n, k), self.kind(*kinds))
            for name, sources, n, k, kinds in (
                ("gate_up", pairs, 2 * width, hidden, sections.gate_up),
                ("down", names.down, hidden, width, sections.down),
            )
        )
        router = self._in_fp32(self.weights.tensors[f"{names.router}.weight"])
        assert router is not None
        return ExpertWeights(
            router,
            gate_up.view(c.num, -1, hidden) if isinstance(gate_up, Tensor) else gate_up,
            down.view(c.num, hidden, -1) if isinstance(down, Tensor) else down,
            c.top_k,
            c.normalizes,
            self._in_fp32(self.weights.tensors.get(f"{names.router}.bias")),
            self._expert_biases(pairs),
            self._expert_biases(names.down),
            c.alpha,
            c.limit,
        )

    def _expert_biases(self, linears: Sequence[str]) -> Tensor | None:
        """Return the biases as [experts, outputs], or None unless every linear has one."""
        assert self.config.experts is not None
        found = [self.weights.tensors.get(f"{linear}.bias") for linear in linears]
        some = [bias for bias in found if bias is not None]
        if len(some) < len(found):
            return None
        return torch.cat(some).view(self.config.experts.num, -1).to(self.device)
