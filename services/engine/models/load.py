"""From a checkpoint directory to a model."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from kvops import Backend
from services.common.text.model_config import ModelConfig
from services.engine.models.decoder import Layer, Linear, Model
from services.engine.models.layout import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    ignored_weights,
    layer_prefix,
    weight_shapes,
)
from services.engine.weights import load_weights


def load_model(directory: Path | str, dtype: torch.dtype, backend: Backend) -> Model:
    """The checkpoint's decoder, computing in `dtype` (bf16 or fp32) on `backend`.

    StartupError: the configuration or a weight is missing, wrong or not supported.
    """
    config = ModelConfig.from_directory(directory)
    shapes = weight_shapes(config)
    weights = load_weights(Path(directory), shapes, dtype, ignored_weights(config))
    return Model(
        config=config,
        ops=backend,
        embedding=weights[EMBEDDING],
        layers=tuple(
            _layer(weights, layer_prefix(i), window) for i, window in enumerate(config.windows)
        ),
        final_norm=weights[FINAL_NORM],
        head=weights[EMBEDDING if config.tied_embeddings else HEAD],
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
