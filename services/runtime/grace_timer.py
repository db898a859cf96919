"""Measures how long each problem has lasted, over repeated checks."""

import time
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class GraceTimer(Generic[T]):
    """Finds the names that have been wrong in every check for at least `limit_s`.

    If the pause between two checks is longer than the limit (and than 1 s), all times start again:
    time in which this process made no check, perhaps because it did not run, does not count.
    `clock` returns seconds from any origin.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._since: dict[T, float] = {}
        self._checked_at = clock()

    def __bool__(self) -> bool:
        """Whether something was wrong at the last check."""
        return bool(self._since)

    def check(self, names: Iterable[T]) -> set[T]:
        """Check once. `names` are wrong now. Returns the names that were wrong in every check for
        at least the limit."""
        now = self._clock()
        if now - self._checked_at > max(self._limit_s, 1.0):
            self._since.clear()
        self._checked_at = now
        self._since = {name: self._since.get(name, now) for name in names}
        return {name for name, since in self._since.items() if now - since >= self._limit_s}
