"""Begins suspects, requests that a worker was computing when it died, one at a time.

See ADR 57.
"""

from collections.abc import Callable


class SuspectQueue:
    """The suspects at this worker, from all gateways. Only the first one is being computed, so if
    this worker dies too, the gateways know which suspect it was computing."""

    def __init__(self) -> None:
        self._queue: dict[str, Callable[[], None]] = {}

    def enter(self, key: str, begin: Callable[[], None]) -> None:
        """Add a suspect; `begin` is called when it is the first."""
        self._queue[key] = begin
        if len(self._queue) == 1:
            begin()

    def withdraw(self, key: str) -> None:
        """Remove a suspect that is to end, unless it is being computed: then `leave` removes it."""
        if key in self._queue and next(iter(self._queue)) != key:
            del self._queue[key]

    def leave(self, key: str) -> None:
        """Remove a suspect, and begin the next one. No error if `key` is not in the queue.

        Call this after the gateway was sent a token of the suspect or the report of its end: a
        crash that the next suspect causes comes later, and is not attributed to this one.
        """
        if key not in self._queue:
            return
        was_first = next(iter(self._queue)) == key
        del self._queue[key]
        if was_first and self._queue:
            next(iter(self._queue.values()))()
