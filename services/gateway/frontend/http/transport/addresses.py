"""The addresses that have connections and requests now."""

from collections import Counter
from collections.abc import Callable

CROWD = 16
"""Unserved connections of an address from which on it may be crowded."""
ASKS_FOR_S = 1.0
"""An address asks for this long after the end of its last request."""


class Addresses:
    """Tells which addresses have many unserved connections while another address asks.

    A connection is unserved from its start, and from the headers of each request, until an answer
    begins. An address asks while a connection of it has a POST request, and for a moment after.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._num_unserved: Counter[str] = Counter()
        self._num_busy: Counter[str] = Counter()
        """Connections that have a POST request."""
        self._asked: dict[str, float] = {}
        """When the last request of each address ended; the earliest first."""

    def waits(self, address: str) -> None:
        """Records that one more connection is unserved."""
        self._num_unserved[address] += 1

    def served(self, address: str) -> None:
        """Records that one fewer connection is unserved."""
        _decrease(self._num_unserved, address)

    def asks(self, address: str) -> None:
        """Records that one more connection has a POST request."""
        self._num_busy[address] += 1

    def answered(self, address: str) -> None:
        """Records that one fewer connection has a request."""
        _decrease(self._num_busy, address)
        self._asked.pop(address, None)
        self._asked[address] = self._clock()
        self._forget()

    def is_crowded(self, address: str) -> bool:
        if self._num_unserved[address] < CROWD:
            return False
        self._forget()
        return any(len(asking) > (address in asking) for asking in (self._num_busy, self._asked))

    def _forget(self) -> None:
        """Keeps only the addresses of the last moment, however many clients come."""
        since = self._clock() - ASKS_FOR_S
        while self._asked and self._asked[first := next(iter(self._asked))] < since:
            del self._asked[first]


def _decrease(counter: Counter[str], key: str) -> None:
    """Keeps only the keys of numbers above 0."""
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
