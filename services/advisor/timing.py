"""What a model takes on this machine: a decode step, and its attention at each block size."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import kvops
from kvops.native import Lane
from services.advisor.attention import time_attention
from services.advisor.step import DecodeStep, time_step
from services.common.errors import StartupError
from services.common.pool.layout import ITEM_BYTES, Dtype
from services.common.text.model_config import ModelConfig
from services.engine.models import load_model
from services.engine.pool import DTYPES

USUAL = 16
"""A block size; that of the whole step."""


@dataclass(frozen=True, slots=True)
class Timed:
    """`attention_us`: of one layer, by block size; `share`: of a step of `step_us`."""

    step: DecodeStep
    attention_us: dict[int, float]
    share: float
    step_us: float


@dataclass(frozen=True, slots=True)
class Engine:
    """What computes, as a worker's settings name it. `weights_cache`: None packs them here."""

    model: Path
    dtype: Dtype
    backend: str
    num_threads: int
    weights_cache: Path | None = None


def time_model(engine: Engine, step: DecodeStep, block_sizes: Sequence[int]) -> Timed:
    """Of as many rows as there is memory for. StartupError: the model cannot be loaded, or the
    backend is not there or cannot read blocks of a size."""
    dtype, config = DTYPES[engine.dtype], ModelConfig.from_directory(engine.model)
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    step = step.fitting(per_token * ITEM_BYTES[engine.dtype])
    try:
        ops = kvops.backend(engine.backend)
        if ops.native is not None:
            ops.native.assign([Lane()] * engine.num_threads)
        model = load_model(engine.model, dtype, ops, cache=engine.weights_cache)
        step_us = 1e6 * time_step(model, step, USUAL)
        seconds = time_attention(config, step, block_sizes, ops, dtype)
    except (kvops.BackendUnavailable, ValueError) as error:
        raise StartupError(str(error)) from error
    us = {size: 1e6 * each for size, each in seconds.items()}
    return Timed(step, us, min(1.0, config.num_layers * us[USUAL] / step_us), step_us)
