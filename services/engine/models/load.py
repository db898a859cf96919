"""Loads a model from a checkpoint directory."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kvops import Backend
from services.common.checkpoint.layout import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    ignored_weights,
    layer_prefix,
    weight_shapes,
)
from services.common.checkpoint.quantization import Quantization
from services.common.errors import StartupError
from services.common.text.model_config import ModelConfig
from services.engine.models.decoder import ComposedModel, Layer, Linear
from services.engine.models.fused import load_fused
from services.engine.models.model import Model
from services.engine.weights.checkpoint import load_weights, weights_digest
from services.engine.weights.packed_file import Progress


def load_model(
    directory: Path | str,
    dtype: torch.dtype,
    backend: Backend,
    *,
    quantize: Quantization | None = None,
    cache: Path | None = None,
    progress: Progress = lambda: None,
) -> Model:
    """Load the checkpoint's decoder, to compute in `dtype` (bf16 or fp32) on `backend`.

    `quantize`: quantize the weights of the linears. `cache`: a directory for packed weights, which
    the next start and the other workers of this host reuse; None: each process packs its own.
    `progress` is called several times a second; an exception that it raises ends the loading.

    StartupError: the configuration, a weight or the quantization is wrong or not supported.
    """
    directory = Path(directory)
    if backend.native is not None:
        return load_fused(directory, dtype, quantize, backend.native, cache, progress)
    if quantize:
        raise StartupError(f"backend {backend.name!r} has no {quantize} kernels; 'cpu' has")
    return _composed(directory, dtype, backend, progress)


def _composed(
    directory: Path, dtype: torch.dtype, backend: Backend, progress: Progress
) -> ComposedModel:
    config = ModelConfig.from_directory(directory)
    shapes = weight_shapes(config)
    weights = load_weights(directory, shapes, dtype, ignored_weights(config))
    return ComposedModel(
        config=config,
        ops=backend,
        embedding=weights[EMBEDDING],
        layers=tuple(
            _layer(weights, layer_prefix(i), window) for i, window in enumerate(config.windows)
        ),
        final_norm=weights[FINAL_NORM],
        head=weights[EMBEDDING if config.tied_embeddings else HEAD],
        weights_digest=weights_digest(directory, progress),
    )


def _layer(weights: Mapping[str, Tensor], prefix: str, window: int | None) -> Layer:
    def linear(name: str) -> Linear:
        return Linear(weights[f"{prefix}.{name}.weight"], weights.get(f"{prefix}.{name}.bias"))

    return Layer(
        input_norm=weights[f"{prefix}.input_layernorm.weight"],
        query=linear("self_attn.q_proj"),
        key=linear("self_attn.k_proj"),
        value=linear("self_attn.v_proj"),
        query_norm=weights.get(f"{prefix}.self_attn.q_norm.weight"),
        key_norm=weights.get(f"{prefix}.self_attn.k_norm.weight"),
        output=linear("self_attn.o_proj"),
        mlp_norm=weights[f"{prefix}.post_attention_layernorm.weight"],
        gate=linear("mlp.gate_proj"),
        up=linear("mlp.up_proj"),
        down=linear("mlp.down_proj"),
        window=window,
    )
