"""`python -m advisor OPTIONS`: the process behind `quire advise block-size`, which may import
PyTorch. OPTIONS is a JSON object of that command's options.

Prints one JSON object: an answer, or {"error": text} with exit status 1.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from advisor.advice import BLOCK_SIZES, DoesNotFit, advise, size_costs
from advisor.workload import RecordedRequest, Workload, WorkloadError, read_workload
from quire.sizes import parse_size
from services.model.checkpoint.reading import read_model_config
from services.model.config.model_config import ModelConfig
from services.pool.layout import ITEM_BYTES, Dtype
from services.runtime.errors import StartupError
from services.runtime.process import set_up_openmp
from services.worker.computed_kind import is_dequantized

FLASH_PAGE = 256
"""flash-attn needs a block size that is a multiple of this."""

_NUM_CONCURRENT = 64
"""Requests of mean length that the pool holds by default."""


def main() -> None:
    args = SimpleNamespace(**json.loads(sys.argv[1]))
    set_up_openmp(args.threads)  # before PyTorch is imported
    try:
        print(json.dumps(block_size(args)))
        _show_progress("")
    except (WorkloadError, StartupError, DoesNotFit) as error:
        print(json.dumps({"error": str(error)}))
        sys.exit(1)


def block_size(args: SimpleNamespace) -> dict[str, Any]:
    """Count what the workload costs with each block size, time the model, and recommend a size.
    WorkloadError; DoesNotFit; StartupError: the model does not exist, the pool's size cannot be
    parsed, or the backend is not available."""
    workload = read_workload(Path(args.workload))
    try:
        from advisor.timing import DEFAULT_BLOCK_SIZE, time_model
    except ModuleNotFoundError as error:
        text = f"{error.name} is not installed: pip install 'quire-serve[worker]'"
        raise StartupError(text) from error
    config = read_model_config(Path(args.model))
    dtype = _dtype(args.dtype, config)
    asked = workload.requests[-args.requests :]
    num_slots = _num_slots(args.pool_memory, config, dtype, asked)

    _show_progress(f"counting the blocks of {len(asked)} requests")
    context = config.max_position_embeddings
    costs = [size_costs(asked, num_slots, size, context) for size in BLOCK_SIZES]
    usual = next(cost for cost in costs if cost.block_size == DEFAULT_BLOCK_SIZE)
    _show_progress(f"timing steps of {usual.num_at_once:.0f} rows")
    cache = None if args.weights_cache == "none" else Path(args.weights_cache).expanduser()
    timed = time_model(
        *(Path(args.model), dtype, args.backend, args.threads, cache),
        dequantize=is_dequantized(config.quantization, args.dtype, "auto"),
        num_rows=max(1, round(usual.num_at_once)),
        context=max(1, round(usual.mean_context)),
        block_sizes=BLOCK_SIZES,
    )
    token_us = timed.step_us / timed.num_rows
    advice = advise(costs, timed.attention_us, timed.attention_share, token_us)
    step = (
        f"{args.backend} kernels: a step of {timed.num_rows} rows of {timed.context} tokens takes "
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
            | {"left": advice.left(cost.block_size)}
            for cost in costs
        ],
        "notes": [step, *_notes(workload, asked)],
    }


def _dtype(asked: str, config: ModelConfig) -> Dtype:
    """The dtype of the KV cache, resolved as a worker resolves it."""
    return "float32" if "float32" in (asked, asked == "auto" and config.dtype) else "bfloat16"


def _num_slots(
    pool_memory: str | None, config: ModelConfig, dtype: Dtype, asked: Sequence[RecordedRequest]
) -> int:
    """Token slots of the simulated pool, a multiple of every block size."""
    largest = max(BLOCK_SIZES)
    if pool_memory:
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        try:
            num_bytes = parse_size(pool_memory)
        except ValueError as error:
            raise StartupError(f"pool memory: {error}") from error
        return num_bytes // (per_token * ITEM_BYTES[dtype]) // largest * largest
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
    notes.append(f"flash-attn, on CUDA, reads blocks of a multiple of {FLASH_PAGE} only")
    return notes


def _show_progress(text: str) -> None:
    """Show progress on a terminal; an empty text clears the line."""
    if sys.stderr.isatty():
        print(f"\r{text:<78}\r", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
