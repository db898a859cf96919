"""Measures the steps of the last seconds, for the planner and for the choice between swapping and
computing again."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

WINDOW_S = 10


@dataclass(slots=True)
class _Second:
    number: int
    busy_s: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0


class StepMeter:
    """Adds up the steps of each second, and keeps the last `WINDOW_S` seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._seconds: deque[_Second] = deque(maxlen=WINDOW_S + 1)

    def add(self, duration_s: float, num_tokens: int) -> None:
        number = int(self._clock())
        if not self._seconds or self._seconds[-1].number != number:
            self._seconds.append(_Second(number))
        second = self._seconds[-1]
        second.busy_s += duration_s
        second.num_steps += 1
        second.num_tokens += num_tokens

    def figures(self) -> dict[str, int]:
        """Return the fields of `Load` that it measures; all 0 without a step in the window."""
        since = int(self._clock()) - WINDOW_S
        busy_s, num_steps, num_tokens = self._sums(since)
        if not num_steps or not busy_s:
            return {}
        window_s = max(self._clock() - max(self._began, since), busy_s)
        return {
            "busy_permille": round(1000 * busy_s / window_s),
            "step_us": round(1e6 * busy_s / num_steps),
            "tokens_per_s": round(num_tokens / busy_s),
        }

    @property
    def ns_per_token(self) -> int:
        """The mean time that a step takes for each token; 0 without a step in the window."""
        busy_s, _, num_tokens = self._sums(int(self._clock()) - WINDOW_S)
        return max(1, round(1e9 * busy_s / num_tokens)) if num_tokens else 0

    def _sums(self, since: int) -> tuple[float, int, int]:
        recent = [second for second in self._seconds if second.number >= since]
        return (
            sum(second.busy_s for second in recent),
            sum(second.num_steps for second in recent),
            sum(second.num_tokens for second in recent),
        )
