"""Scenarios turned into figures, in the one form that tables, JSON and comparisons are made of."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.serving.prompts import Prompts
from bench.serving.record import Record, summarize
from bench.serving.scenarios import closed_loop, interference, poisson, shared_prefix
from bench.serving.target import Target


@dataclass(frozen=True, slots=True)
class Measurement:
    """`scenario` names what was asked, `values` what was seen, by the name of the column."""

    scenario: str
    values: dict[str, float]

    def is_number(self, column: str) -> bool:
        """Whether it was measured, and is finite."""
        return math.isfinite(self.values.get(column, math.nan))

    def as_json(self) -> dict[str, Any]:
        """JSON knows no nan: what is not a number is null."""
        finite = {key: v if math.isfinite(v) else None for key, v in self.values.items()}
        return {"scenario": self.scenario, **finite}


async def closed(
    target: Target, prompts: Prompts, streams: int, length: int, num_tokens: int, turns: int
) -> Measurement:
    asked = prompts.many(streams * turns, length)
    records = await closed_loop(target, asked, streams, num_tokens)
    name = f"{streams} streams, {length} in, {num_tokens} out"
    return Measurement(name, latencies(records))


async def poisson_arrivals(
    target: Target,
    prompts: Prompts,
    rate: float,
    count: int,
    length: int,
    num_tokens: int,
    seed: int,
) -> Measurement:
    records = await poisson(target, prompts.many(count, length), rate, num_tokens, seed)
    values = latencies(records)
    good = sum(record.meets_slo for record in records)
    values |= {"good %": 100 * good / count, "goodput req/s": good / values["seconds"]}
    return Measurement(f"{rate:g} req/s at random, {length} in, {num_tokens} out", values)


async def prefixed(
    target: Target, prompts: Prompts, count: int, prefix: int, length: int, num_tokens: int
) -> list[Measurement]:
    seen = await shared_prefix(target, prompts, count, prefix, length, num_tokens)
    name = f"{count} requests, {prefix} shared + {length} in, {num_tokens} out"
    return [
        Measurement(f"{name}, cold", latencies(seen.cold)),
        Measurement(f"{name}, warm", latencies(seen.warm)),
    ]


async def interfered(
    target: Target, prompts: Prompts, streams: int, length: int, long: int
) -> Measurement:
    seen = await interference(target, prompts.many(streams, length), prompts.one(long))
    values = {
        "quiet gap ms": 1000 * seen.quiet_gap_s,
        "worst gap ms": 1000 * seen.worst_gap_s,
        "worst / quiet": seen.ratio,
        "ttft p50 ms": 1000 * seen.ttft_s,
    }
    return Measurement(f"{streams} streams decode, {long} tokens arrive", values)


def latencies(records: Sequence[Record]) -> dict[str, float]:
    figures = summarize(records)
    values = {
        "requests": float(figures.requests),
        "failed": float(figures.failed),
        "seconds": figures.seconds,
        "tok/s": figures.tokens_per_s,
        "decode tok/s": figures.decode_tokens_per_s,
    }
    for what, percentiles in (("ttft", figures.ttft_ms), ("gap", figures.gap_ms)):
        values |= {
            f"{what} p{percent} ms": value
            for percent, value in zip((50, 90, 99), percentiles, strict=True)
        }
    return values | {"worst gap ms": figures.worst_gap_ms}
