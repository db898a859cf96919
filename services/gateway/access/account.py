"""An account: what one API key may still use, at this gateway, and how much of its budget is used.

Rates are token buckets that hold one minute's worth. Nobody knows the length of an answer before
its end, so a request is admitted while its key's bucket is not empty, and what it uses is charged
as it comes: a key may overdraw its rate or its budget by the requests that run at that moment. An
overdrawn rate is paid back before the next request.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

from quire.api_keys import ApiKey, Period
from services.common.errors import QuotaExceeded, RateLimited
from services.gateway.access.caller import Caller

_BUSY_DELAY_S = 1.0
"""When a client may try again that has as many sequences as it may have."""


class Bucket:
    """A token bucket that fills with `per_minute` each minute and holds as much. None: no limit."""

    def __init__(self, per_minute: int | None, now: float) -> None:
        self.per_minute = per_minute
        self._level = float(per_minute or 0)
        self._at = now

    def delay_s(self, wanted: float, now: float) -> float:
        """Seconds until the bucket has `wanted`; 0 if it has that now."""
        if self.per_minute is None:
            return 0.0
        rate = self.per_minute / 60
        self._level = min(self.per_minute, self._level + (now - self._at) * rate)
        self._at = now
        return max(0.0, (wanted - self._level) / rate)

    def take(self, amount: int) -> None:
        self._level -= amount


class Account:
    """The account of one key. It outlives changes of the key in the file."""

    def __init__(
        self,
        key: ApiKey,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._clock = clock
        self._wall_clock = wall_clock
        self.num_sequences = 0
        """Sequences that run or wait."""
        self.num_used = 0
        """Tokens that this gateway has charged in the current period."""
        self.num_used_elsewhere = 0
        """Tokens that other gateways have charged in the current period."""
        self.period = period_name(key.budget_period, wall_clock())
        self.revise(key)

    def revise(self, key: ApiKey) -> None:
        """Follow a change of the key in the file. A changed rate begins with a full bucket."""
        now = self._clock()
        before = getattr(self, "key", None)
        self.key = key
        if before is None or before.requests_per_minute != key.requests_per_minute:
            self._requests = Bucket(key.requests_per_minute, now)
        if before is None or before.tokens_per_minute != key.tokens_per_minute:
            self._tokens = Bucket(key.tokens_per_minute, now)
        self.caller = Caller(
            key=key.name,
            tenant=key.tenant,
            is_operator=key.role == "operator",
            models=None if key.models is None else frozenset(key.models),
            priority_ceiling=key.priority_ceiling,
            charge=self.charge,
        )

    @contextmanager
    def admitted(self, num_sequences: int) -> Iterator[None]:
        """Wraps one request from its arrival to its end. Raises RateLimited or QuotaExceeded."""
        self._check_concurrency(num_sequences)
        self._check_budget()
        now, key = self._clock(), self.key
        if delay_s := self._tokens.delay_s(1, now):
            raise RateLimited(
                f"key {key.name} has used its {key.tokens_per_minute} tokens a minute", delay_s
            )
        if delay_s := self._requests.delay_s(1, now):
            raise RateLimited(
                f"key {key.name} has sent its {key.requests_per_minute} requests a minute", delay_s
            )
        self._requests.take(1)
        self.num_sequences += num_sequences
        try:
            yield
        finally:
            self.num_sequences -= num_sequences

    def charge(self, num_tokens: int) -> None:
        self._tokens.take(num_tokens)
        self.num_used += num_tokens

    def follow_period(self) -> None:
        """Begin to count anew if a new period has begun."""
        period = period_name(self.key.budget_period, self._wall_clock())
        if period != self.period:
            self.period, self.num_used, self.num_used_elsewhere = period, 0, 0

    def _check_concurrency(self, num_sequences: int) -> None:
        limit = self.key.max_concurrency
        if limit is not None and self.num_sequences + num_sequences > limit:
            raise RateLimited(
                f"key {self.key.name} has {self.num_sequences} sequences that run or wait, and may "
                f"have {limit}; this request needs {num_sequences}",
                _BUSY_DELAY_S,
            )

    def _check_budget(self) -> None:
        key = self.key
        if key.token_budget is None:
            return
        self.follow_period()
        num_used = self.num_used + self.num_used_elsewhere
        if num_used >= key.token_budget:
            raise QuotaExceeded(
                f"key {key.name} has used {num_used} tokens; its budget is {key.token_budget} "
                f"({key.budget_period})",
                _period_left_s(key.budget_period, self._wall_clock()),
            )


def period_name(period: Period, unix_s: float) -> str:
    """The name of the period (UTC) that contains a time: 2026-11-24, 2026-11, or total."""
    now = datetime.fromtimestamp(unix_s, UTC)
    return {"day": f"{now:%Y-%m-%d}", "month": f"{now:%Y-%m}", "total": "total"}[period]


def _period_left_s(period: Period, unix_s: float) -> float | None:
    """Seconds until the next period begins; None: no other follows."""
    if period == "total":
        return None
    now = datetime.fromtimestamp(unix_s, UTC)
    today = now.replace(hour=0, minute=0, second=0, microsecond=0)
    a_month_on = (today.replace(day=1) + timedelta(days=32)).replace(day=1)
    return ((today + timedelta(days=1) if period == "day" else a_month_on) - now).total_seconds()
