"""The loads of `bench.compare` on a server, and their figures.

Each scenario draws new prompts, so that nothing but what it shares on purpose is in a prefix cache.
"""

import asyncio
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from quire.bench.load import Load
from quire.bench.options import LoadOptions, WorkloadOptions
from quire.bench.prompts import Prompts
from quire.bench.record import Record
from quire.bench.run import Result, run
from quire.bench.target import RequestFailed, Target
from quire.bench.workload import Session, Turn, synthetic
from services.model.checkpoint.reading import read_model_config

_TTFT_LIMIT_S, _GAP_LIMIT_S = 5.0, 0.15
"""A good request has its first token within the one, and no gap of the other."""

_ENDLESS = 2048
"""Tokens of streams that are cancelled: more than they can decode until then."""

_QUIET, _AFTER = 32, 8
"""How many chunks a stream receives before the long prompt, and after its first token."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """`scenario` names what was asked; `values` are its figures, nan for what did not happen."""

    scenario: str
    values: dict[str, float]


def prompts_of(checkpoint: Path, seed: int) -> Prompts:
    """Prompts of token ids from the vocabulary of a checkpoint."""
    return Prompts(seed, None, read_model_config(checkpoint).vocab_size)


async def closed(
    target: Target, prompts: Prompts, streams: int, shape: WorkloadOptions
) -> Measurement:
    """`streams` requests at a time, one of each stream."""
    schedule = LoadOptions(concurrency=streams, num_requests=streams, warmup=0)
    result = await _run(target, synthetic(prompts, shape), schedule, shape.output_len)
    return Measurement(f"{streams} streams, {_named(shape)}", _figures(result))


async def poisson(
    target: Target, prompts: Prompts, rate: float, count: int, shape: WorkloadOptions, seed: int
) -> Measurement:
    """`count` requests at random times, whether the server keeps up or not."""
    schedule = LoadOptions(request_rate=rate, num_requests=count, warmup=0, seed=seed)
    result = await _run(target, synthetic(prompts, shape), schedule, shape.output_len)
    values, num_good = _figures(result), sum(map(_is_good, result.records))
    values["good %"] = 100 * num_good / count
    values["goodput req/s"] = num_good / values["seconds"]
    return Measurement(f"{rate:g} req/s at random, {_named(shape)}", values)


async def prefixed(
    target: Target, prompts: Prompts, count: int, shape: WorkloadOptions
) -> tuple[Measurement, Measurement]:
    """`count` requests at once that share a prefix that nobody has computed, then as many others
    with the same prefix."""
    sessions = synthetic(prompts, shape)
    schedule = LoadOptions(concurrency=count, num_requests=count, warmup=0)
    cold = await _run(target, sessions, schedule, shape.output_len)
    warm = await _run(target, sessions, schedule, shape.output_len)
    name = f"{count} requests, {shape.prefix_len} shared + {_named(shape)}"
    return (
        Measurement(f"{name}, cold", _figures(cold)),
        Measurement(f"{name}, warm", _figures(warm)),
    )


async def interference(
    target: Target, prompts: Prompts, streams: int, length: int, long: int
) -> Measurement:
    """A long prompt arrives when each of some streams decodes; they decode until it has its first
    token, and a little more. RequestFailed: one of them failed."""
    load = Load(target)

    def send(length: int, num_tokens: int) -> asyncio.Task[None]:
        prompt = prompts.draw(length)
        return asyncio.create_task(load.send(Session([Turn(lambda: prompt, num_tokens)])))

    tasks = [send(length, _ENDLESS) for _ in range(streams)]
    try:
        await asyncio.sleep(0)  # each task begins its record
        records = tuple(load.records)
        await _reached(records, _QUIET)
        await send(long, 1)
        intruder = load.records[-1]
        if intruder.error:
            raise RequestFailed(intruder.message)
        await _reached(records, _AFTER, since=intruder.ended)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    quiet_s = statistics.median(
        later - earlier
        for record in records
        for earlier, later in itertools.pairwise(record.arrivals)
        if later <= intruder.sent
    )
    worst_s = max(worst_gap_s(record, intruder.sent, intruder.ended) for record in records)
    values = {
        "worst / quiet": worst_s / quiet_s,
        "worst gap ms": 1000 * worst_s,
        "ttft p50 ms": 1000 * intruder.ttft_s,
    }
    return Measurement(f"{streams} streams decode, {long} tokens arrive", values)


def worst_gap_s(record: Record, began: float, ended: float) -> float:
    """The longest gap that touches the time between `began` and `ended`."""
    pairs = itertools.pairwise(record.arrivals)
    return max(later - earlier for earlier, later in pairs if later > began and earlier < ended)


async def _reached(records: Sequence[Record], count: int, since: float = 0.0) -> None:
    """Returns when each has so many arrivals after `since`. RequestFailed: one failed or ended."""
    for record in records:
        while sum(at > since for at in record.arrivals) < count:
            if record.error or record.num_output_tokens >= _ENDLESS:
                raise RequestFailed(record.message or "a stream ended before the long prompt did")
            await asyncio.sleep(0.001)


async def _run(
    target: Target, sessions: Iterator[Session], schedule: LoadOptions, num_tokens: int
) -> Result:
    """RequestFailed: not one request was answered. An answer of another length counts as failed."""
    result = await run(
        target,
        lambda is_warmup: iter(()) if is_warmup else sessions,
        schedule,
        as_chat=False,
        slo_ms={},
        config={},
        progress=lambda load, name: nullcontext(),
    )
    for record in result.records:
        if record.is_whole and record.num_output_tokens != num_tokens:
            record.error = "length"
            record.message = f"{record.num_output_tokens} tokens instead of {num_tokens}"
    if all(record.error for record in result.records):
        raise RequestFailed(f"no answer: {result.records[0].message}")
    return result


def _figures(result: Result) -> dict[str, float]:
    whole = [record for record in result.records if not record.error]
    values = {
        "failed": float(len(result.records) - len(whole)),
        "seconds": result.summary["duration_s"],
        "tok/s": result.summary["output_token_throughput"],
        "decode tok/s": decode_rate(whole),
    }
    for name, key in (("ttft", "ttft_ms"), ("gap", "itl_ms")):
        figures = result.summary[key] or {}
        values |= {f"{name} p{p} ms": figures.get(f"p{p}", math.nan) for p in (50, 99)}
    return values


def decode_rate(records: Sequence[Record]) -> float:
    """Tokens a second of streams that run side by side, from the moment when the last has its first
    token to the moment when the first has its last one; nan where these times cross."""
    began = max(record.arrivals[0] for record in records)
    ended = min(record.arrivals[-1] for record in records)
    if ended <= began:
        return math.nan
    tokens = sum(
        count
        for record in records
        for at, count in zip(record.arrivals, record.counts, strict=True)
        if began < at <= ended
    )
    return tokens / (ended - began)


def _is_good(record: Record) -> bool:
    return (
        not record.error
        and record.ttft_s < _TTFT_LIMIT_S
        and all(gap < _GAP_LIMIT_S for gap in record.gaps_s)
    )


def _named(shape: WorkloadOptions) -> str:
    return f"{shape.prompt_len} in, {shape.output_len} out"
