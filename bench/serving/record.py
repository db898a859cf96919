"""What the client of one request saw, and figures over many."""

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

TTFT_LIMIT_S = 5.0
GAP_LIMIT_S = 0.15
TOGETHER_S = 100e-6
"""What a client reads this soon after the last was waiting for it: the server had sent both before,
and the time between says how fast the client reads. Reading takes about 10 us, a token 1 ms."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """Tokens that came together; `at` is a time of `perf_counter`."""

    at: float
    num_tokens: int


@dataclass(slots=True)
class Record:
    """One request. `sent` is when it was due: a client that is late charges the server with it."""

    sent: float = field(default_factory=time.perf_counter)
    arrivals: list[Arrival] = field(default_factory=list)
    error: str | None = None
    _last_read: float = -math.inf

    def add(self, num_tokens: int, now: float | None = None) -> None:
        """Tokens were read at `now` (default: this moment). Read within `TOGETHER_S` of the ones
        before, they are part of the same arrival."""
        now = time.perf_counter() if now is None else now
        if now - self._last_read < TOGETHER_S:
            arrival = self.arrivals[-1]
            self.arrivals[-1] = Arrival(arrival.at, arrival.num_tokens + num_tokens)
        else:
            self.arrivals.append(Arrival(now, num_tokens))
        self._last_read = now

    @property
    def num_tokens(self) -> int:
        return sum(arrival.num_tokens for arrival in self.arrivals)

    @property
    def ttft_s(self) -> float:
        """Infinite when nothing came."""
        return self.arrivals[0].at - self.sent if self.arrivals else math.inf

    @property
    def gaps_s(self) -> list[float]:
        """Between arrivals: tokens that come together have one gap before them."""
        return [later.at - earlier.at for earlier, later in pairwise(self.arrivals)]

    @property
    def meets_slo(self) -> bool:
        return (
            self.error is None
            and self.ttft_s < TTFT_LIMIT_S
            and all(gap < GAP_LIMIT_S for gap in self.gaps_s)
        )


@dataclass(frozen=True, slots=True)
class Figures:
    """Over the requests of a scenario; latencies in ms. Percentiles of what did not happen (a gap
    of single tokens) are nan."""

    requests: int
    failed: int
    seconds: float
    tokens_per_s: float
    """Generated tokens by the whole time, prefill included."""

    decode_tokens_per_s: float
    """While all streams decode; see `decode_rate`."""

    ttft_ms: tuple[float, float, float]
    """Percentiles 50, 90, 99."""

    gap_ms: tuple[float, float, float]
    worst_gap_ms: float


def summarize(records: Sequence[Record]) -> Figures:
    """ValueError: no request was answered; its text is the first error."""
    answered = [record for record in records if record.error is None and record.arrivals]
    if not answered:
        raise ValueError(f"no answer: {records[0].error if records else 'nothing was sent'}")
    began = min(record.sent for record in records)
    ended = max(record.arrivals[-1].at for record in answered)
    gaps = [gap for record in answered for gap in record.gaps_s]
    return Figures(
        requests=len(records),
        failed=len(records) - len(answered),
        seconds=ended - began,
        tokens_per_s=sum(record.num_tokens for record in answered) / (ended - began),
        decode_tokens_per_s=decode_rate(answered),
        ttft_ms=percentiles_ms([record.ttft_s for record in answered]),
        gap_ms=percentiles_ms(gaps),
        worst_gap_ms=1000 * max(gaps, default=math.nan),
    )


def decode_rate(records: Sequence[Record]) -> float:
    """Tokens a second of streams that run side by side, from the moment when the last has its first
    token to the moment when the first has its last one; nan where these times cross."""
    started = max(record.arrivals[0].at for record in records)
    ended = min(record.arrivals[-1].at for record in records)
    if ended <= started:
        return math.nan
    tokens = sum(
        arrival.num_tokens
        for record in records
        for arrival in record.arrivals
        if started < arrival.at <= ended
    )
    return tokens / (ended - started)


def percentiles_ms(seconds: Sequence[float]) -> tuple[float, float, float]:
    """50, 90 and 99, interpolated."""
    if not seconds:
        return (math.nan, math.nan, math.nan)
    if len(seconds) == 1:
        return (1000 * seconds[0],) * 3
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return (1000 * cuts[49], 1000 * cuts[89], 1000 * cuts[98])
