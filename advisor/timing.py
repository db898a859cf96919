"""Times a model on this machine: a whole decode step, and attention with each block size."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import kvops
from advisor.advice import BLOCK_SIZES, DEFAULT_BLOCK_SIZE
from kvops.native import Lane
from quire.errors import QuireError
from services.engine.batch import Draw, Row
from services.engine.models import Model, load_model
from services.engine.pool import DTYPES
from services.engine.runner import Runner
from services.model.config.model_config import ModelConfig
from services.pool.layout import ITEM_BYTES, Dtype
from services.protocol.ticket import SamplingParams
from services.runtime.errors import StartupError
from services.worker.computed_kind import is_dequantized

_GREEDY = SamplingParams(temperature=0.0)
_STEP_BYTES = 1 << 30
"""KV of the step that is timed; its rows are as many as fit."""
_ARENA_BYTES = 256 << 20
"""KV of the layers whose attention is timed: more than the CPU's caches hold."""
_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class ModelTimings:
    num_rows: int
    """The rows of the step that was timed."""
    step_us: float
    """The time of a whole decode step with blocks of DEFAULT_BLOCK_SIZE."""
    attention_us: dict[int, float]
    """Attention of one layer, by block size."""
    attention_share: float
    """The share that attention has in the step."""


def time_model(
    model: Path,
    config: ModelConfig,
    dtype: str,
    kv_dtype: Dtype,
    backend: str,
    threads: int,
    weights_cache: str,
    num_rows: int,
    context: int,
) -> ModelTimings:
    """Time a decode step of `num_rows` sequences of `context` tokens, or of as many as there is
    memory for. Raises QuireError if the model cannot be loaded, or the backend is not available or
    cannot read blocks of a size."""
    per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
    num_rows = max(1, min(num_rows, _STEP_BYTES // (context * per_token * ITEM_BYTES[kv_dtype])))
    cache = None if weights_cache == "none" else Path(weights_cache).expanduser()
    dequantize = is_dequantized(config.quantization, dtype, "auto", backend)
    of_kv = DTYPES[kv_dtype]
    try:
        ops = kvops.backend(backend)
        if ops.native is not None:
            ops.native.assign([Lane()] * threads)
        loaded = load_model(model, of_kv, ops, dequantize=dequantize, cache=cache)
        step_us = 1e6 * _time_step(loaded, num_rows, context)
        us = _time_attention(config, num_rows, context, ops, of_kv)
    except (kvops.BackendUnavailable, StartupError, ValueError) as error:
        raise QuireError(str(error), "timing") from error
    share = min(1.0, config.num_layers * us[DEFAULT_BLOCK_SIZE] / step_us)
    return ModelTimings(num_rows, step_us, us, share)


def _time_step(model: Model, num_rows: int, context: int) -> float:
    """Seconds of the fastest of several steps. The arena is all zeros, which does not change the
    time."""
    config, size = model.config, DEFAULT_BLOCK_SIZE
    blocks_a_row = -(-context // size)
    block = (config.num_layers, 2, size, config.num_kv_heads, config.head_dim)
    kv = torch.zeros((num_rows * blocks_a_row, *block), dtype=model.dtype)
    runner = Runner(model, kv, size, kvops.backend("reference"))  # no blocks are copied
    rows = [
        Row([0], context - 1, range(first, first + blocks_a_row), draws=(Draw(_GREEDY, 0),))
        for first in range(0, num_rows * blocks_a_row, blocks_a_row)
    ]
    # `result` returns when the tokens are drawn.
    return _fastest(lambda: runner.launch(rows).result(), for_s=0.4, least=3)


def _time_attention(
    config: ModelConfig, num_rows: int, context: int, ops: kvops.Backend, dtype: torch.dtype
) -> dict[int, float]:
    """Microseconds of one layer, by block size, on one arena that is viewed with blocks of each
    size in turn, and has as many of the layers as fit. The blocks of a row are scattered over it.
    Raises ValueError if the backend cannot read blocks of a size."""
    largest, scale = max(BLOCK_SIZES), config.head_dim**-0.5
    num_values = 2 * num_rows * -(-context // largest) * largest
    num_values *= config.num_kv_heads * config.head_dim
    num_layers = min(config.num_layers, _ARENA_BYTES // (num_values * dtype.itemsize))
    num_layers = max(1, num_layers)
    noise = torch.randn(1 << 20).to(dtype)
    arena = noise.repeat(-(-num_layers * num_values // len(noise)))[: num_layers * num_values]
    q = torch.randn(num_rows, config.num_heads, config.head_dim).to(dtype)
    cu_query_lens = torch.arange(num_rows + 1, dtype=torch.int32)
    context_lens = torch.full_like(cu_query_lens[1:], context)

    def layers(size: int) -> Callable[[], list[Tensor]]:
        kv = arena.view(-1, num_layers, 2, size, config.num_kv_heads, config.head_dim)
        tables = torch.randperm(len(kv)).to(torch.int32).view(num_rows, -1)
        where = (tables, cu_query_lens, context_lens, scale)
        return lambda: [
            ops.paged_attention(q, kv[:, layer], *where, config.windows[layer], max_query_len=1)
            for layer in range(num_layers)
        ]

    calls = {size: layers(size) for size in BLOCK_SIZES}
    best = dict.fromkeys(BLOCK_SIZES, float("inf"))
    for _ in range(_ROUNDS):  # sizes in turn, so that other load on the machine affects all alike
        for size, call in calls.items():
            best[size] = min(best[size], _fastest(call, for_s=0.04, least=1))
    return {size: 1e6 * seconds / num_layers for size, seconds in best.items()}


def _fastest(call: Callable[[], object], for_s: float, least: int) -> float:
    """Seconds of the fastest of at least `least` calls, which are repeated `for_s` long."""
    times, until = list[float](), time.perf_counter() + for_s
    while len(times) < least or time.perf_counter() < until:
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)
