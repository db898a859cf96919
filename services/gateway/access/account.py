"""An account: what one API key may still use, at this gateway.

Rates are token buckets that hold one minute's worth. Nobody knows the length of an answer before
its end, so a request is admitted while its key's bucket is not empty, and what it uses is charged
as it comes: a key may overdraw its rate by the requests that run at that moment. An overdrawn rate
is paid back before the next request.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quire.api_keys import ApiKey
from quire.types import Sampling
from services.gateway.access.caller import ONE, Caller, NoAccount
from services.runtime.errors import InvalidRequest, RateLimited

_BUSY_DELAY_S = 1.0
"""When a client may try again that has as many sequences as it may have."""


class Bucket:
    """A token bucket that fills with `per_minute` each minute and holds as much; None is no
    limit."""

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


class Account(NoAccount):
    """The account of one key. It outlives changes of the key in the file."""

    def __init__(self, key: ApiKey, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.num_sequences = 0
        """Sequences that run or wait."""
        self._requests = self._tokens = Bucket(None, clock())
        self.revise(key)

    def revise(self, key: ApiKey) -> None:
        """Follow a change of the key in the file. A changed rate begins with a full bucket."""
        self.key = key
        if self._requests.per_minute != key.requests_per_minute:
            self._requests = Bucket(key.requests_per_minute, self._clock())
        if self._tokens.per_minute != key.tokens_per_minute:
            self._tokens = Bucket(key.tokens_per_minute, self._clock())
        self.caller = Caller(
            key=key.name,
            tenant=key.tenant,
            is_operator=key.role == "operator",
            models=None if key.models is None else frozenset(key.models),
            priority_ceiling=key.priority_ceiling,
            retained_blocks=key.retained_blocks,
            account=self,
        )

    @contextmanager
    def admitted(self, asked: Sampling = ONE, *, is_further: bool = False) -> Iterator[None]:
        """See `NoAccount.admitted`."""
        name, number = ("n", asked.n) if asked.beam is None else ("beam_width", asked.beam.width)
        most = self.key.max_sequences
        if (limit := self.key.max_concurrency) is not None:
            most = min(most, limit)  # more could not run even alone
        if number > most:
            raise InvalidRequest(
                f"{name} is {number}; key {self.key.name} may ask for at most {most}", name
            )
        # The gateway refuses a width below 1, but after the request has waited.
        num_sequences = max(1, number)
        self._check_concurrency(num_sequences)
        now, key = self._clock(), self.key
        if delay_s := self._tokens.delay_s(1, now):
            raise RateLimited(
                f"key {key.name} has used its {key.tokens_per_minute} tokens a minute", delay_s
            )
        if not is_further and (delay_s := self._requests.delay_s(1, now)):
            raise RateLimited(
                f"key {key.name} has sent its {key.requests_per_minute} requests a minute", delay_s
            )
        if not is_further:
            self._requests.take(1)
        self.num_sequences += num_sequences
        try:
            yield
        finally:
            self.num_sequences -= num_sequences

    def charge(self, num_tokens: int) -> None:
        self._tokens.take(num_tokens)

    def _check_concurrency(self, num_sequences: int) -> None:
        limit = self.key.max_concurrency
        if limit is not None and self.num_sequences + num_sequences > limit:
            raise RateLimited(
                f"key {self.key.name} has {self.num_sequences} sequences that run or wait, and may "
                f"have {limit}; this request needs {num_sequences}",
                _BUSY_DELAY_S,
            )
