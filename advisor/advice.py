"""Recommends a block size for a recorded workload, with reasons (`quire advise block-size`).

A workload file has JSON lines, one for each request, in any order:

    {"num_prompt_tokens": 812, "num_generated_tokens": 128, "arrival_s": 12.5,
     "prefix": "support", "num_shared_tokens": 700}

`arrival_s` may count from any time; without it, the order of the lines is the order of arrival.
Prompts with the same `prefix` begin alike: two of them share as many tokens as the smaller of their
`num_shared_tokens`. A gateway's log in JSON is a workload, too: its `request_ended` lines count.
They do not say which prompts shared a prefix, only how many tokens of each prompt were cached, a
multiple of the block size at that time. Requests with equally many cached tokens count as sharing
them.

Each block size leaves a share of the throughput of a machine that wastes nothing. The share is a
product of four parts, each timed or counted:

    memory      slots that hold KV / reserved slots
    prefix      tokens that must be computed / tokens computed (the prefix cache finds whole blocks)
    attention   time of a decode step with the fastest block size / time with this block size
    store       time of a token / that time plus the block store's time for the token

The product is the share of requests per second that is left if memory limits how many requests run
at once and the other three parts determine how long each takes.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import pydantic.dataclasses
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quire.errors import QuireError
from quire.sizes import parse_size
from services.model.checkpoint.reading import read_model_config
from services.model.config.model_config import ModelConfig
from services.pool.allotment import LOOK_AHEAD, WATERMARK, blocks_at_admission, blocks_for_decode
from services.pool.layout import ITEM_BYTES, Dtype
from services.runtime.errors import StartupError
from services.runtime.process import set_up_openmp

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
DEFAULT_BLOCK_SIZE = 16
"""The block size with which the whole step is timed."""

TOLERANCE = 0.04
"""Products that differ by less than this count as equal: the product of blocks of 16 varied this
much between three runs on an otherwise idle machine (docs/benchmarks/memory.md)."""

_NUM_CONCURRENT = 64
"""Requests of mean length that the pool holds by default."""
_CALL_US, _BLOCK_US = 150.0, 3.5
"""The store's time for a call, and for each block in it (docs/benchmarks/store-and-recovery.md)."""
_REQUEST_ENDED = "request_ended"
_Count = Annotated[int, Field(ge=0, le=1 << 24, strict=True)]  # 1 << 24: more than any context
_Seconds = Annotated[float, Field(gt=-1e12, lt=1e12, strict=True)]


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class RecordedRequest:
    """One recorded request. It shares its first `num_shared_tokens` with other requests of the same
    `prefix`, or with none if that is empty."""

    num_prompt_tokens: Annotated[_Count, Field(ge=1)]
    num_generated_tokens: Annotated[_Count, Field(ge=1)]
    arrival_s: _Seconds = 0.0
    prefix: str = ""
    num_shared_tokens: _Count = 0

    def __post_init__(self) -> None:
        if self.num_shared_tokens and not self.prefix:
            raise ValueError("num_shared_tokens without a prefix")
        if self.num_shared_tokens > self.num_prompt_tokens:
            raise ValueError("num_shared_tokens is more than the prompt's tokens")

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_generated_tokens


class _Ended(BaseModel):
    """A `request_ended` line of a gateway's log."""

    num_prompt_tokens: _Count
    num_generated_tokens: _Count
    num_cached_tokens: _Count
    num_sequences: _Count = 1
    timestamp: datetime
    duration_ms: _Seconds

    def request(self) -> RecordedRequest | None:
        """Return None for a request without tokens, and for a request of several sequences, since
        the log does not have their lengths."""
        if not (self.num_prompt_tokens and self.num_generated_tokens) or self.num_sequences != 1:
            return None
        num_cached = min(self.num_cached_tokens, self.num_prompt_tokens)
        arrival_s = self.timestamp.timestamp() - self.duration_ms / 1000
        prefix = f"{num_cached} tokens" if num_cached else ""
        return RecordedRequest(
            self.num_prompt_tokens, self.num_generated_tokens, arrival_s, prefix, num_cached
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests in order of arrival."""

    requests: tuple[RecordedRequest, ...]
    is_log: bool = False
    """Whether the requests come from a gateway's log."""
    num_skipped: int = 0
    """The number of requests of the log that are left out."""


def read_workload(path: Path) -> Workload:
    """Read a workload file or a gateway's log. Only a log has events, and only a log may contain
    lines (a traceback) that are neither an event nor a request. Raises QuireError with the line and
    the reason if the file does not exist or contains no workload."""
    found: list[RecordedRequest | None] = []
    is_log, problem = False, None
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:  # `docker compose logs` writes a name before the object
                    fields = json.loads(line[max(line.find("{"), 0) :])
                    if not isinstance(fields, dict):
                        raise ValueError("not a JSON object")
                    if "event" not in fields:
                        found.append(RecordedRequest(**fields))
                    elif fields["event"] == _REQUEST_ENDED:
                        found.append(_Ended.model_validate(fields).request())
                    is_log = is_log or fields.get("event") is not None
                except (ValueError, RecursionError) as error:
                    wrong = f"{path}, line {number}: {_reason(error)}"
                    if _REQUEST_ENDED in line:
                        raise QuireError(wrong, "workload") from error
                    problem = problem or wrong
    except OSError as error:
        raise QuireError(f"{path}: {error.strerror}", "workload") from error
    except UnicodeDecodeError as error:
        raise QuireError(f"{path}: not text: {error}", "workload") from error
    if problem and not is_log:
        raise QuireError(problem, "workload")
    requests = [each for each in found if each is not None]
    if not requests:
        none = f"a log in which none of {len(found)} requests counts" if is_log else "empty"
        raise QuireError(f"{path}: {none}", "workload")
    in_order = sorted(requests, key=lambda asked: asked.arrival_s)
    return Workload(tuple(in_order), is_log, len(found) - len(requests))


def _reason(error: Exception) -> str:
    if isinstance(error, json.JSONDecodeError | RecursionError):
        return f"not JSON: {error}"
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    if first["type"] == "unexpected_keyword_argument":
        return f"{first['loc'][0]!r} is not a field of a request"
    return ": ".join([*map(str, first["loc"]), first["msg"].removeprefix("Value error, ")])


@dataclass(frozen=True, slots=True)
class SizeCosts:
    """The costs of a workload with one block size, beside the costs of attention."""

    block_size: int
    utilization: float
    """The share of the reserved slots that holds KV, as `tail` and `look_ahead` are shares that
    hold none."""
    tail: float
    look_ahead: float
    num_at_once: float
    """The mean number of running requests, whose mean length is `mean_context`."""
    mean_context: float
    blocks_per_request: float
    store_calls_per_token: float
    """The store's calls for a generated token, which take `store_us_per_token`."""
    store_us_per_token: float
    lost_tokens: float
    """Tokens of shared prefixes that a request computes again."""
    prefix_efficiency: float
    """The share of all computed tokens that must be computed."""


def size_costs(
    asked: Sequence[RecordedRequest], num_slots: int, block_size: int, max_model_len: int
) -> SizeCosts:
    """Count the slots that each request holds in each of its steps, if the pool of `num_slots`
    token slots is as full as it can be without preemptions. Blocks of a shared prefix count for the
    first request that has it. A sequence may have `max_model_len` tokens, as far as its worker
    knows. Raises QuireError if a request can never get its slots."""
    num_blocks, num_requests = num_slots // block_size, len(asked)
    reserved = filled = tails = computed = num_steps = num_calls = num_growths = in_tables = 0
    needed = lost = 0
    for request, num_shared in zip(asked, shared_tokens(asked), strict=True):
        length = request.num_tokens
        if length > num_blocks * block_size:
            pool = f"a pool of {num_blocks} blocks of {block_size}"
            text = f"a request of {length} tokens never fits {pool}"
            raise QuireError(text, "does_not_fit")
        longest = max(length, min(max_model_len, num_blocks * block_size))
        shared = num_shared // block_size
        needed += length - num_shared
        lost += num_shared % block_size
        held = blocks_at_admission(request.num_prompt_tokens, block_size)
        for num_tokens in range(request.num_prompt_tokens, length):  # those that have KV
            if num_tokens > request.num_prompt_tokens:
                before = held
                held = max(held, blocks_for_decode(num_tokens, LOOK_AHEAD, longest, block_size))
                num_growths += held > before
            reserved += held - shared
            filled += num_tokens - shared * block_size
            tails += -num_tokens % block_size
            computed += num_tokens
        num_steps += request.num_generated_tokens
        in_tables += held
        # The allocation, the release, and commits of the prompt and of each block that is filled.
        num_full = request.num_prompt_tokens // block_size
        num_calls += 2 + (num_full > shared) + (length - 1) // block_size - num_full
    slots = reserved * block_size
    at_once = num_blocks * block_size * (1 - WATERMARK) * num_steps / slots
    at_once = max(1.0, min(num_requests, at_once))
    # All requests that grow in a step are in one call.
    extends = num_steps / at_once * (1 - (1 - num_growths / num_steps) ** at_once)
    calls = num_calls + extends
    # Each block is allocated, committed and released once.
    store_us = _CALL_US * calls + _BLOCK_US * 3 * in_tables
    return SizeCosts(
        block_size,
        utilization=filled / slots,
        tail=tails / slots,
        look_ahead=(slots - filled - tails) / slots,
        num_at_once=at_once,
        mean_context=computed / num_steps,
        blocks_per_request=in_tables / num_requests,
        store_calls_per_token=calls / num_steps,
        store_us_per_token=store_us / num_steps,
        lost_tokens=lost / num_requests,
        prefix_efficiency=needed / (needed + lost),
    )


def shared_tokens(requests: Sequence[RecordedRequest]) -> list[int]:
    """For each prompt, in order of arrival, the number of tokens that it shares with an earlier
    one. The last token of a prompt does not count, since it is always computed."""
    longest: dict[str, int] = {}
    shared = []
    for request in requests:
        here = longest.get(request.prefix, 0) if request.prefix else 0
        shared.append(min(here, request.num_shared_tokens, request.num_prompt_tokens - 1))
        if request.prefix:
            longest[request.prefix] = max(here, request.num_shared_tokens)
    return shared


@dataclass(frozen=True, slots=True)
class Advice:
    block_size: int
    shares: Mapping[int, Mapping[str, float]]
    """The parts of the throughput that each block size leaves, each from 0 to 1."""
    left: Mapping[int, float]
    """The product of the parts of each block size."""
    reasons: tuple[str, ...]


def advise(
    costs: Sequence[SizeCosts],
    attention_us: Mapping[int, float],
    attention_share: float,
    token_us: float,
) -> Advice:
    """Recommend the smallest of the block sizes whose product is within TOLERANCE of the largest:
    the advantages of small blocks are counted exactly, and the advantages of large blocks timed.

    `attention_us` is the time of attention in one layer, by block size, `attention_share` the share
    of attention in a decode step, and `token_us` the step's time for each of its tokens."""
    fastest = min(attention_us.values())
    shares = {
        cost.block_size: {
            "memory": cost.utilization,
            "prefix": cost.prefix_efficiency,
            "attention": 1 / (1 + attention_share * (attention_us[cost.block_size] / fastest - 1)),
            "store": token_us / (token_us + cost.store_us_per_token),
        }
        for cost in costs
    }
    left = {size: math.prod(parts.values()) for size, parts in shares.items()}
    best = max(left, key=left.__getitem__)
    chosen = min(size for size in left if left[size] >= left[best] * (1 - TOLERANCE))
    reasons = [f"{chosen} leaves {left[chosen]:.1%} of the machine"]
    reasons += [
        f"{size} instead: {_difference(shares[size], shares[chosen])}"
        for size in sorted({chosen // 2, chosen * 2} & left.keys())
    ]
    if best != chosen:
        reasons.append(
            f"{best} is ahead by {left[best] / left[chosen] - 1:.1%}, which timings do not tell"
            " from nothing"
        )
    return Advice(chosen, shares, left, tuple(reasons))


def _difference(one: Mapping[str, float], other: Mapping[str, float]) -> str:
    """The relative difference, as text: each part that differs, and the product."""
    ratios = {part: one[part] / other[part] - 1 for part in one}
    texts = [f"{part} {ratio:+.1%}" for part, ratio in ratios.items() if abs(ratio) >= 0.001]
    product = math.prod(one.values()) / math.prod(other.values()) - 1
    return f"{', '.join(texts) or 'no difference'}: {product:+.1%}"


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
        from advisor.timing import time_model

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
    costs = {size: size_costs(asked, num_slots, size, context) for size in BLOCK_SIZES}
    usual = costs[DEFAULT_BLOCK_SIZE]
    num_rows, context = (max(1, round(n)) for n in (usual.num_at_once, usual.mean_context))
    show_progress(f"timing steps of {num_rows} rows")
    timed = time_model(
        model, config, dtype, kv_dtype, backend, threads, weights_cache, num_rows, context
    )
    token_us = timed.step_us / timed.num_rows
    advice = advise(list(costs.values()), timed.attention_us, timed.attention_share, token_us)
    step = (
        f"a step of {timed.num_rows} rows of {context} tokens takes {timed.step_us / 1000:.1f} ms"
    )
    notes = [f"{backend} kernels: {step}, {timed.attention_share:.0%} of it in attention"]
    if len(asked) < len(read.requests):
        notes.append(f"the last {len(asked)} of {len(read.requests)} requests")
    if read.num_skipped:
        notes.append(
            f"{read.num_skipped} requests of the log are left out: they got no token, or had "
            "several sequences"
        )
    if read.is_log and any(request.prefix for request in asked):
        notes.append("prefixes are those that were found cached then, in blocks of then")
    notes.append("flash-attn, on CUDA, reads blocks of a multiple of 256 only")
    return {
        "block_size": advice.block_size,
        "reasons": advice.reasons,
        "num_requests": len(asked),
        "num_slots": num_slots,
        "step": {"attention_share": timed.attention_share, "token_us": token_us},
        "sizes": [
            {**asdict(cost), "attention_us": timed.attention_us[size], "left": advice.left[size]}
            for size, cost in costs.items()
        ],
        "notes": notes,
    }


def _num_slots(
    pool_memory: str | None, config: ModelConfig, dtype: Dtype, asked: Sequence[RecordedRequest]
) -> int:
    """Token slots of the simulated pool, a multiple of every block size."""
    largest = max(BLOCK_SIZES)
    if pool_memory:
        per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim
        slots = parse_size(pool_memory) // (per_token * ITEM_BYTES[dtype])
    else:  # at least twice the longest request, so that it fits above the watermark
        lengths = [request.num_tokens for request in asked]
        slots = max(_NUM_CONCURRENT * sum(lengths) // len(lengths), 2 * max(lengths)) + largest - 1
    return slots // largest * largest
