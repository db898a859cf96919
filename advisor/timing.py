"""Times a model on this machine: a whole decode step, and attention with each block size."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import kvops
from advisor.attention import time_attention
from advisor.step import DecodeStep, time_step
from kvops.native import Lane
from services.common.errors import StartupError
from services.common.pool.layout import ITEM_BYTES, Dtype
from services.common.text.model_config import ModelConfig
from services.engine.models import load_model
from services.engine.pool import DTYPES

DEFAULT_BLOCK_SIZE = 16
"""The block size with which the whole step is timed."""


@dataclass(frozen=True, slots=True)
class ModelTimings:
    """The timings of a model. `attention_us`: attention of one layer, by block size; `share`: the
    share that attention with blocks of DEFAULT_BLOCK_SIZE has in a step, which takes `step_us`."""

    step: DecodeStep
    attention_us: dict[int, float]
    share: float
    step_us: float


@dataclass(frozen=True, slots=True)
class Engine:
    """The engine to time, as in a worker's settings. `weights_cache`: None packs the weights in
    this process."""

    model: Path
    dtype: Dtype
    backend: str
    num_threads: int
    weights_cache: Path | None = None
    dequantize: bool = False
    """Whether linears that the checkpoint has quantized compute in floating point."""


def time_model(engine: Engine, step: DecodeStep, block_sizes: Sequence[int]) -> ModelTimings:
    """Time `step` and attention, with as many rows as there is memory for. StartupError: the model
    cannot be loaded, or the backend is not available or cannot read blocks of a size."""
    dtype, config = DTYPES[engine.dtype], ModelConfig.from_directory(engine.model)
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    step = step.fitting(per_token * ITEM_BYTES[engine.dtype])
    try:
        ops = kvops.backend(engine.backend)
        if ops.native is not None:
            ops.native.assign([Lane()] * engine.num_threads)
        model = load_model(
            *(engine.model, dtype, ops), dequantize=engine.dequantize, cache=engine.weights_cache
        )
        step_us = 1e6 * time_step(model, step, DEFAULT_BLOCK_SIZE)
        seconds = time_attention(config, step, block_sizes, ops, dtype)
    except (kvops.BackendUnavailable, ValueError) as error:
        raise StartupError(str(error)) from error
    us = {size: 1e6 * each for size, each in seconds.items()}
    share = min(1.0, config.num_layers * us[DEFAULT_BLOCK_SIZE] / step_us)
    return ModelTimings(step, us, share, step_us)
