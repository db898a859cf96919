"""Forecasts how long requests wait and run, for comparison with their deadlines.

Little's law: if `num_slots` sequences run and each takes `S` seconds, one of them ends every
`S / num_slots` seconds. The forecast measures only the time that requests run.

See ADR 61.
"""

from collections import deque
from collections.abc import Hashable


class Forecast:
    """The forecast of one model queue. Times are seconds of any clock that only goes forward.

    Every answer is 0 as long as nothing was measured, so that no request is refused on a guess.
    """

    _WINDOW = 64

    def __init__(self) -> None:
        self.num_running = 0
        """Slots in use."""
        self._started: dict[Hashable, tuple[float, int]] = {}
        """When each running request started, and its number of slots."""
        self._sum_started_at = 0.0
        """Over all slots in use."""
        self._ended: deque[tuple[float, int]] = deque(maxlen=self._WINDOW)
        """The run time and the number of steps of the last requests."""

    def started(self, request: Hashable, now: float, num_slots: int = 1) -> None:
        self._started[request] = now, num_slots
        self._sum_started_at += now * num_slots
        self.num_running += num_slots

    def stopped(self, request: Hashable) -> None:
        """Forget a request that was requeued: its run time so far is not that of a whole request.
        Does nothing if the request does not run."""
        started_at, num_slots = self._started.pop(request, (0.0, 0))
        self._sum_started_at -= started_at * num_slots
        self.num_running -= num_slots

    def ended(self, request: Hashable, num_tokens: int, now: float) -> None:
        """Measure a request that ran for `num_tokens` steps, however it ended. Does nothing if the
        request does not run."""
        if request in self._started:
            self._ended.append((now - self._started[request][0], num_tokens))
            self.stopped(request)

    def wait_s(self, num_ahead: int, num_free_slots: int, now: float, num_wanted: int = 1) -> float:
        """Time until a request behind `num_ahead` sequences gets `num_wanted` slots."""
        num_slots = self.num_running + num_free_slots
        num_to_end = num_ahead + num_wanted - num_free_slots
        if num_to_end <= 0 or not self.num_running:
            return 0.0
        return num_to_end * self._mean_run_time_s(now) / num_slots

    def run_time_s(self, max_tokens: int | None, *, ignore_eos: bool) -> float:
        """Time from the slot to the last token. A request with `ignore_eos` generates `max_tokens`;
        any other generates as many tokens as the measured requests on average, or `max_tokens` if
        that is less."""
        num_tokens = sum(num_tokens for _, num_tokens in self._ended)
        if not num_tokens:
            return 0.0
        mean_tokens = num_tokens / len(self._ended)
        if max_tokens is None:
            expected = mean_tokens
        else:
            expected = max_tokens if ignore_eos else min(max_tokens, mean_tokens)
        return expected * self._sum_s / num_tokens

    def _mean_run_time_s(self, now: float) -> float:
        """Mean run time of a sequence. If workers become slower, the age of the running sequences
        shows it before the first of them ends."""
        age_s = now - self._sum_started_at / self.num_running
        return max(age_s, self._sum_s / len(self._ended)) if self._ended else age_s

    @property
    def _sum_s(self) -> float:
        return sum(run_time_s for run_time_s, _ in self._ended)
