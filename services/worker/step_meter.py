"""Measures the steps of the last seconds, for the planner."""

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
        now = self._clock()
        since = int(now) - WINDOW_S
        recent = [second for second in self._seconds if second.number >= since]
        busy_s = sum(second.busy_s for second in recent)
        num_steps = sum(second.num_steps for second in recent)
        if not num_steps or not busy_s:
            return {}
        window_s = max(now - max(self._began, since), busy_s)
        return {
            "busy_permille": round(1000 * busy_s / window_s),
            "step_us": round(1e6 * busy_s / num_steps),
            "tokens_per_s": round(sum(second.num_tokens for second in recent) / busy_s),
        }
