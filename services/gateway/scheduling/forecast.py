"""How long requests will take: what a deadline is compared with while a line waits.

Little's law: of `num_slots` sequences at work that take `S` seconds each, one ends every
`S / num_slots` seconds. Only time at work is measured; time in line is what is forecast.

See ADR 61.
"""

from collections import deque
from collections.abc import Hashable


class Forecast:
    """Times are those of any clock that only goes forward, in seconds. While nothing is known yet
    every answer is 0: nobody is refused on a guess."""

    _WINDOW = 64

    def __init__(self) -> None:
        self._began: dict[Hashable, tuple[float, int]] = {}
        """Since when, and with how many slots."""
        self._sum_started_at = 0.0
        self._num_running = 0
        self._ended: deque[tuple[float, int]] = deque()
        self._sum_s = 0.0
        self._sum_tokens = 0

    @property
    def num_running(self) -> int:
        """Slots in use."""
        return self._num_running

    def started(self, who: Hashable, now: float, num_slots: int = 1) -> None:
        self._began[who] = now, num_slots
        self._sum_started_at += now * num_slots
        self._num_running += num_slots

    def stopped(self, who: Hashable) -> None:
        """It goes on later; what it has done so far says nothing of a whole one. Who is not at work
        is no error."""
        began, num_slots = self._began.pop(who, (0.0, 0))
        self._sum_started_at -= began * num_slots
        self._num_running -= num_slots

    def ended(self, who: Hashable, num_tokens: int, now: float) -> None:
        """However it ended, it was at work for so long, over `num_tokens` steps. Who is not at work
        is no error."""
        if who not in self._began:
            return
        began, _ = self._began[who]
        self.stopped(who)
        self._ended.append((now - began, num_tokens))
        self._sum_s += now - began
        self._sum_tokens += num_tokens
        if len(self._ended) > self._WINDOW:
            oldest_s, oldest_tokens = self._ended.popleft()
            self._sum_s -= oldest_s
            self._sum_tokens -= oldest_tokens

    def wait_s(self, num_ahead: int, num_free_slots: int, now: float, num_wanted: int = 1) -> float:
        """Until somebody with so many sequences before them gets the slots they want."""
        num_slots = self.num_running + num_free_slots
        num_to_end = num_ahead + num_wanted - num_free_slots
        if num_to_end <= 0 or not self.num_running:
            return 0.0
        return num_to_end * self._mean_run_time_s(now) / num_slots

    def run_time_s(self, max_tokens: int | None, *, ignore_eos: bool) -> float:
        """From slot to last token, of one that generates `max_tokens`: all of them when it goes
        `ignore_eos`, else as many as the others do if they are fewer."""
        if not self._sum_tokens:
            return 0.0
        usual = self._sum_tokens / len(self._ended)
        if max_tokens is None or not ignore_eos:
            num_tokens = usual if max_tokens is None else min(max_tokens, usual)
        else:
            num_tokens = max_tokens
        return num_tokens * self._sum_s / self._sum_tokens

    def _mean_run_time_s(self, now: float) -> float:
        """Of one sequence, on average. Those at work now count too: when it gets slower, their age
        says so before the first of them ends."""
        age_s = now - self._sum_started_at / self._num_running
        return max(age_s, self._sum_s / len(self._ended)) if self._ended else age_s
