"""Things that have been wrong for too long, look after look."""

import time
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class GraceTimer(Generic[T]):
    """`clock` counts seconds from anywhere. A pause between two looks as long as the limit starts
    everything anew: nobody is blamed for the time in which nobody looked."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._since: dict[T, float] = {}
        self._looked_at = clock()

    def __bool__(self) -> bool:
        """Whether something was wrong at the last look."""
        return bool(self._since)

    def look(self, names: Iterable[T]) -> set[T]:
        """Those of `names`, wrong now, that were in every look for at least the limit."""
        now = self._clock()
        if now - self._looked_at > max(self._limit_s, 1.0):
            self._since.clear()
        self._looked_at = now
        self._since = {name: self._since.get(name, now) for name in names}
        return {name for name, since in self._since.items() if now - since >= self._limit_s}
