"""Recommends a block size for a recorded workload (`quire advise block-size`)."""

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from advisor.advice import BLOCK_SIZES, Advice, SizeCosts, StepTime, advise
from advisor.costs import Replay, num_generated, replay, size_costs
from advisor.step import DecodeStep
from advisor.store_cost import counted_us, embedded_valkey, measured_us
from advisor.timing import DEFAULT_BLOCK_SIZE, Engine, ModelTimings, time_model
from advisor.workload import RecordedRequest, Workload
from quire.choices import Quantize
from quire.sizes import parse_size
from quire.supervisor.errors import NoValkey
from services.common.errors import StartupError
from services.common.pool.layout import ITEM_BYTES, Dtype
from services.common.text.model_config import ModelConfig
from services.worker.computed_kind import is_dequantized

FLASH_PAGE = 256
"""flash-attn needs a block size that is a multiple of this (`kvops.attention.flash`, which only
machines with a GPU can import)."""

_NUM_CONCURRENT = 64  # requests of mean length that the simulated pool holds by default
_TIMED_REQUESTS = 48  # requests replayed on a real server: takes seconds instead of minutes


@dataclass(frozen=True, slots=True)
class AdviceRequest:
    """The input of the advisor. `pool_memory`: "" for room for 64 requests of mean length.
    `most_requests`: only the last so many requests are replayed. `redis_url`: None starts an
    embedded Valkey. `weights_cache`: as for workers."""

    workload: Workload
    model: Path
    pool_memory: str = ""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    quantize: Quantize = "auto"
    backend: str = "cpu"
    num_threads: int = 1
    most_requests: int = 2000
    redis_url: str | None = None
    weights_cache: Path | None = None


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The recommendation and its figures. `notes`: how they were found, for the user."""

    advice: Advice
    costs: tuple[SizeCosts, ...]
    step: StepTime
    num_requests: int
    num_slots: int
    notes: tuple[str, ...]


async def recommend(request: AdviceRequest, report: Callable[[str], None]) -> Recommendation:
    """Replay the workload with each block size, time model and store, and recommend a block size.
    Progress goes to `report`.

    StartupError: the model does not exist, the pool's size cannot be parsed, or the backend is not
    available; DoesNotFit; BlockStoreError; TimeoutError: the embedded Valkey does not answer.
    """
    config = ModelConfig.from_directory(request.model)
    dtype = _dtype(request, config)
    asked = request.workload.requests[-request.most_requests :]
    num_slots = _num_slots(request, config, dtype, asked)
    context = config.max_position_embeddings

    replays = {}
    for size in BLOCK_SIZES:
        report(f"simulating {len(asked)} requests in blocks of {size}")
        replays[size] = await replay(asked, num_slots, size, context)
    step = _average_step(replays[DEFAULT_BLOCK_SIZE])
    report(f"timing steps of {step.num_rows} rows of {step.context} tokens")
    threads, cache = request.num_threads, request.weights_cache
    engine = Engine(
        *(request.model, dtype, request.backend, threads, cache),
        dequantize=is_dequantized(config.quantization, request.dtype, request.quantize),
    )
    timed = time_model(engine, step, BLOCK_SIZES)
    report("timing the store")
    store_us, how = await _store_us(request, asked, num_slots, replays, context)

    costs = tuple(
        size_costs(asked, size, replays[size], timed.attention_us[size], store_us[size])
        for size in BLOCK_SIZES
    )
    step_time = StepTime(timed.share, timed.step_us / timed.step.num_rows)
    advice, notes = advise(costs, step_time), _notes(request, asked, timed, how)
    return Recommendation(advice, costs, step_time, len(asked), num_slots, notes)


def _dtype(request: AdviceRequest, config: ModelConfig) -> Dtype:
    """The dtype of the KV cache, resolved as a worker resolves it."""
    if request.dtype != "auto":
        return request.dtype
    return "float32" if config.dtype == "float32" else "bfloat16"


def _num_slots(
    request: AdviceRequest, config: ModelConfig, dtype: Dtype, asked: Sequence[RecordedRequest]
) -> int:
    """Token slots of the simulated pool, a multiple of every block size."""
    largest = max(BLOCK_SIZES)
    if request.pool_memory:
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        try:
            num_bytes = parse_size(request.pool_memory)
        except ValueError as error:
            raise StartupError(f"pool memory: {error}") from error
        return num_bytes // (per_token * ITEM_BYTES[dtype]) // largest * largest
    mean = sum(request.num_tokens for request in asked) / len(asked)
    longest = max(request.num_tokens for request in asked)
    # At least twice the longest request, so that it fits above the watermark.
    return -(-max(int(_NUM_CONCURRENT * mean), 2 * longest) // largest) * largest


def _average_step(found: Replay) -> DecodeStep:
    outcome = found.outcome
    return DecodeStep(max(1, round(outcome.mean_running)), max(1, round(outcome.mean_context)))


async def _store_us(
    request: AdviceRequest,
    asked: Sequence[RecordedRequest],
    num_slots: int,
    replays: dict[int, Replay],
    context: int,
) -> tuple[dict[int, float], str]:
    """The store's time in microseconds per generated token, by block size, and a text that says how
    it was found."""
    some = asked[:_TIMED_REQUESTS]
    try:
        async with AsyncExitStack() as stack:
            url = request.redis_url
            if url is None:
                url = await stack.enter_async_context(embedded_valkey())
            measured = {
                size: await measured_us(url, some, num_slots, size, context) for size in replays
            }
            return measured, f"store: the calls of {len(some)} requests, timed on a server"
    except NoValkey:
        counted = {
            size: counted_us(each.num_calls, each.num_blocks) / num_generated(asked)
            for size, each in replays.items()
        }
        return counted, "store: counted calls and blocks, not timed (there is no Valkey here)"


def _notes(
    request: AdviceRequest, asked: Sequence[RecordedRequest], timed: ModelTimings, store: str
) -> tuple[str, ...]:
    workload, step = request.workload, timed.step
    notes = [
        f"{request.backend} kernels: a step of {step.num_rows} rows of {step.context} tokens "
        f"takes {timed.step_us / 1000:.1f} ms, {timed.share:.0%} of it in attention",
        store,
    ]
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
    return tuple(notes)
