"""One run of `quire bench`: warm-up, load, result."""

import itertools
from collections.abc import Awaitable, Callable, Iterator, Mapping
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

Progress = Callable[[Load, int | None], AbstractAsyncContextManager[None]]
"""Shows a load while it runs, of which the number of requests may be known."""


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
    """`sessions`: a function of whether it is the warm-up. Raises RequestFailed if a request of the
    warm-up fails."""
    await _warm_up(target, sessions(True), options.warmup, as_chat)
    load = Load(target, as_chat)
    work, num_requests = _work(load, sessions(False), options)
    async with progress(load, num_requests):
        duration_s = await work()
    return Result(config, summarize(load.records, duration_s, slo_ms), load.records)


async def _warm_up(target: Target, sessions: Iterator[Session], number: int, as_chat: bool) -> None:
    load = Load(target, as_chat)
    await load.closed_loop(itertools.islice(sessions, number), min(number, 8) or 1, 0.0, None)
    for record in load.records:
        if record.error:
            raise RequestFailed(f"the warm-up failed: {record.message}", record.error)


def _work(
    load: Load, sessions: Iterator[Session], options: LoadOptions
) -> tuple[Callable[[], Awaitable[float]], int | None]:
    sessions = itertools.islice(sessions, options.num_requests)
    concurrency, limit_s = options.concurrency, options.duration
    if concurrency is not None:
        return lambda: load.closed_loop(sessions, concurrency, options.ramp, limit_s), None
    if options.request_rate is not None:
        times = poisson(options.request_rate, options.ramp, options.seed)
        timed = (Session(each.turns, due) for due, each in zip(times, sessions, strict=False))
    else:
        timed = (each for each in sessions)
    planned = list(itertools.takewhile(lambda s: limit_s is None or s.due < limit_s, timed))
    return lambda: load.open_loop(planned), sum(len(each.turns) for each in planned)
