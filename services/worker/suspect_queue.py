"""Requests over which a worker has died, begun here one at a time, whichever gateway sends them.

See ADR 57.
"""

from collections.abc import Callable


class SuspectQueue:
    """The first is being computed, the others stand in line. Should this worker die too, it is
    known over whom."""

    def __init__(self) -> None:
        self._line: dict[str, Callable[[], None]] = {}

    def enter(self, key: str, begin: Callable[[], None]) -> None:
        """`begin` is called when its turn has come."""
        self._line[key] = begin
        if len(self._line) == 1:
            begin()

    def withdraw(self, key: str) -> None:
        """It is to end: its turn does not come any more. Who is being computed leaves later."""
        if key in self._line and next(iter(self._line)) != key:
            del self._line[key]

    def leave(self, key: str) -> None:
        """Its gateway has been sent a token of it, or word of its end: what the next one does to
        this worker comes after that, and is not laid to its charge. Who is not in line is no
        error."""
        if key not in self._line:
            return
        was_first = next(iter(self._line)) == key
        del self._line[key]
        if was_first and self._line:
            next(iter(self._line.values()))()
