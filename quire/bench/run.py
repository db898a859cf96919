"""One run of `quire bench`: warm-up, load, result."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from quire.bench.load import Load
from quire.bench.options import LoadOptions
from quire.bench.record import Record
from quire.bench.summary import summarize
from quire.bench.target import RequestFailed, Target
from quire.bench.workload import Session, poisson

Progress = Callable[[Load, str], AbstractAsyncContextManager[None]]
"""Shows a load while it runs, under a name."""


@dataclass(slots=True)
class Result:
    config: Mapping[str, Any]
    summary: dict[str, Any]
    records: list[Record]
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))

    def as_json(self) -> dict[str, Any]:
        return {"date": self.date, "config": self.config, "summary": self.summary}


async def run(
    target: Target,
    sessions: Callable[[bool], Iterator[Session]],
    options: LoadOptions,
    *,
    as_chat: bool,
    slo_ms: Mapping[str, float],
    config: Mapping[str, Any],
    progress: Progress,
) -> Result:
    """Run the warm-up and the load; `sessions` returns the sessions of either. Raises RequestFailed
    if a request of the warm-up fails."""
    warmup = Load(target, as_chat)
    async with progress(warmup, "warm-up"):
        await _warm_up(warmup, itertools.islice(sessions(True), options.warmup))
    load = Load(target, as_chat, options.duration)
    async with progress(load, "load"):
        duration_s = await _run(load, sessions(False), options)
    return Result(config, summarize(load.records, duration_s, slo_ms), load.records)


async def _warm_up(load: Load, sessions: Iterator[Session]) -> None:
    await load.closed_loop(sessions, 8, 0.0)
    for record in load.records:
        if record.error:
            raise RequestFailed(f"the warm-up failed: {record.message}", record.error)


async def _run(load: Load, sessions: Iterator[Session], options: LoadOptions) -> float:
    """Run the load; returns its duration. Times of an open loop are drawn before its start."""
    sessions = itertools.islice(sessions, options.num_requests)
    if options.concurrency is not None:
        return await load.closed_loop(sessions, options.concurrency, options.ramp)
    assert options.request_rate is not None
    limit_s = options.duration
    times = poisson(options.request_rate, options.ramp, options.seed)
    timed = (Session(each.turns, due) for due, each in zip(times, sessions, strict=False))
    return await load.open_loop(
        list(itertools.takewhile(lambda s: limit_s is None or s.due < limit_s, timed))
    )
