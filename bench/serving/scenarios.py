"""The loads of `bench.compare` on a server, and their figures.

Each scenario draws new prompts, so that nothing but what it shares on purpose is in a prefix cache.
"""

import asyncio
import itertools
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.load import Prompts, Record, RequestFailed, Target, poisson, send, send_all
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
    return Prompts(seed, read_model_config(checkpoint).vocab_size)


async def closed(
    target: Target,
    prompts: Prompts,
    streams: int,
    length: int,
    num_tokens: int,
    count: int | None = None,
) -> Measurement:
    """`streams` requests at a time, `count` in all; by default one of each stream."""
    drawn = [prompts.draw(length) for _ in range(count or streams)]
    values, _ = await _run(target, drawn, num_tokens, at_a_time=streams)
    return Measurement(f"{streams} streams, {length} in, {num_tokens} out", values)


async def at_random(
    target: Target, prompts: Prompts, rate: float, count: int, seed: int
) -> Measurement:
    """`count` requests at random times, whether the server keeps up or not."""
    length, num_tokens = 512, 128
    times = list(itertools.islice(poisson(rate, seed), count))
    drawn = [prompts.draw(length) for _ in times]
    values, records = await _run(target, drawn, num_tokens, times=times)
    num_good = sum(map(_is_good, records))
    values["good %"] = 100 * num_good / count
    values["goodput req/s"] = num_good / values["seconds"]
    return Measurement(f"{rate:g} req/s at random, {length} in, {num_tokens} out", values)


async def prefixed(
    target: Target, prompts: Prompts, count: int, num_tokens: int
) -> list[Measurement]:
    """`count` requests at once that share a prefix that nobody has computed, then as many others
    with the same prefix."""
    shared, length = prompts.draw(1024), 64
    name = f"{count} requests, {len(shared)} shared + {length} in, {num_tokens} out"
    found = []
    for state in ("cold", "warm"):
        drawn = [shared + prompts.draw(length) for _ in range(count)]
        values, _ = await _run(target, drawn, num_tokens)
        found.append(Measurement(f"{name}, {state}", values))
    return found


async def interference(
    target: Target, prompts: Prompts, streams: int, length: int, long: int
) -> Measurement:
    """A long prompt arrives when each of some streams decodes; they decode until it has its first
    token, and a little more. RequestFailed: one of them failed."""
    records = [Record() for _ in range(streams)]
    tasks = [
        asyncio.create_task(send(target, prompts.draw(length), _ENDLESS, record))
        for record in records
    ]
    try:
        await _reached(records, _QUIET)
        intruder = Record()
        await send(target, prompts.draw(long), 1, intruder)
        if intruder.error:
            raise RequestFailed(intruder.error)
        await _reached(records, _AFTER, since=intruder.arrivals[-1])
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
    worst_s = max(worst_gap_s(record, intruder.sent, intruder.arrivals[-1]) for record in records)
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
            if record.error or record.num_tokens >= _ENDLESS:
                raise RequestFailed(record.error or "a stream ended before the long prompt did")
            await asyncio.sleep(0.001)


async def _run(
    target: Target,
    prompts: Sequence[list[int]],
    num_tokens: int,
    **schedule: Any,
) -> tuple[dict[str, float], list[Record]]:
    """The figures and the requests; `schedule` is for `send_all`. RequestFailed: not one of them
    was answered."""
    began = time.perf_counter()
    records = await send_all(target, prompts, num_tokens, **schedule)
    seconds = time.perf_counter() - began
    whole = [record for record in records if not record.error]
    if not whole:
        raise RequestFailed(f"no answer: {records[0].error}")
    values = {
        "failed": float(len(records) - len(whole)),
        "seconds": seconds,
        "tok/s": len(whole) * num_tokens / seconds,
        "decode tok/s": decode_rate(whole),
    }
    ttfts, gaps = [each.ttft_s for each in whole], [gap for each in whole for gap in each.gaps_s]
    for name, measured in (("ttft", ttfts), ("gap", gaps)):
        for percent in (50, 99):
            value = 1000 * np.percentile(measured, percent) if measured else math.nan
            values[f"{name} p{percent} ms"] = float(value)
    return values, records


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
