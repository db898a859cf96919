"""Recommends a block size for a recorded workload: counts what it costs with each size, times the
model on this machine, and combines both (`quire advise block-size`)."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from advisor.advice import BLOCK_SIZES, advise, size_costs
from advisor.workload import RecordedRequest, Workload, read_workload
from quire.errors import QuireError
from quire.sizes import parse_size
from services.model.checkpoint.reading import read_model_config
from services.model.config.model_config import ModelConfig
from services.pool.layout import ITEM_BYTES, Dtype
from services.runtime.errors import StartupError
from services.runtime.process import set_up_openmp
from services.worker.computed_kind import is_dequantized

_NUM_CONCURRENT = 64
"""Requests of mean length that the pool holds by default."""


def recommend(
    workload: Path,
    model: Path,
    *,
    pool_memory: str | None,
    dtype: str,
    backend: str,
    threads: int,
    requests: int,
    weights_cache: str,
    show_progress: Callable[[str], object],
) -> dict[str, Any]:
    """Return the answer as JSON. Raises QuireError if the workload or the model cannot be used, a
    request can never get its slots, or the backend is not available."""
    read = read_workload(workload)
    set_up_openmp(threads)  # before PyTorch is imported
    try:
        from advisor.timing import DEFAULT_BLOCK_SIZE, time_model

        config = read_model_config(model)
    except ModuleNotFoundError as error:
        text = f"{error.name} is not installed: pip install 'quire-serve[worker]'"
        raise QuireError(text, "no_worker") from error
    except StartupError as error:
        raise QuireError(str(error), "model") from error
    # The dtype of the KV cache, resolved as a worker resolves it.
    is_single = "float32" in (dtype, dtype == "auto" and config.dtype)
    kv_dtype: Dtype = "float32" if is_single else "bfloat16"
    asked = read.requests[-requests:]
    num_slots = _num_slots(pool_memory, config, kv_dtype, asked)
    show_progress(f"counting the blocks of {len(asked)} requests")
    context = config.max_position_embeddings
    costs = [size_costs(asked, num_slots, size, context) for size in BLOCK_SIZES]
    usual = next(cost for cost in costs if cost.block_size == DEFAULT_BLOCK_SIZE)
    show_progress(f"timing steps of {usual.num_at_once:.0f} rows")
    cache = None if weights_cache == "none" else Path(weights_cache).expanduser()
    timed = time_model(
        model,
        config,
        kv_dtype,
        backend,
        threads,
        cache,
        dequantize=is_dequantized(config.quantization, dtype, "auto", backend),
        num_rows=max(1, round(usual.num_at_once)),
        context=max(1, round(usual.mean_context)),
        block_sizes=BLOCK_SIZES,
    )
    token_us = timed.step_us / timed.num_rows
    advice = advise(costs, timed.attention_us, timed.attention_share, token_us)
    step = (
        f"{backend} kernels: a step of {timed.num_rows} rows of {timed.context} tokens takes "
        f"{timed.step_us / 1000:.1f} ms, {timed.attention_share:.0%} of it in attention"
    )
    return {
        "block_size": advice.block_size,
        "reasons": advice.reasons,
        "num_requests": len(asked),
        "num_slots": num_slots,
        "step": {"attention_share": timed.attention_share, "token_us": token_us},
        "sizes": [
            asdict(cost)
            | {"attention_us": timed.attention_us[cost.block_size]}
            | {"left": advice.left[cost.block_size]}
            for cost in costs
        ],
        "notes": [step, *_notes(read, asked)],
    }


def _num_slots(
    pool_memory: str | None, config: ModelConfig, dtype: Dtype, asked: Sequence[RecordedRequest]
) -> int:
    """Token slots of the simulated pool, a multiple of every block size."""
    largest = max(BLOCK_SIZES)
    if pool_memory:
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        slots = parse_size(pool_memory) // (per_token * ITEM_BYTES[dtype])
        return slots // largest * largest
    mean = sum(request.num_tokens for request in asked) / len(asked)
    longest = max(request.num_tokens for request in asked)
    # At least twice the longest request, so that it fits above the watermark.
    return -(-max(int(_NUM_CONCURRENT * mean), 2 * longest) // largest) * largest


def _notes(workload: Workload, asked: Sequence[RecordedRequest]) -> list[str]:
    notes = []
    if len(asked) < len(workload.requests):
        notes.append(f"the last {len(asked)} of {len(workload.requests)} requests")
    if workload.num_skipped:
        notes.append(
            f"{workload.num_skipped} requests of the log are left out: they got no token, or had "
            "several sequences"
        )
    if workload.is_log and any(request.prefix for request in asked):
        notes.append("prefixes are those that were found cached then, in blocks of then")
    notes.append("flash-attn, on CUDA, reads blocks of a multiple of 256 only")
    return notes
