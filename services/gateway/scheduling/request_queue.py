"""Holds waiting requests in the order of `services.protocol.ticket.queue_order`.

The order of a request never changes, so every gateway, every worker and the store agree on it.
"""

import heapq
import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from services.protocol.ticket import parts_of_order, queue_order


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """A request's priority, and its arrival by the registry's clock in ms."""

    priority: int
    arrival: int

    @classmethod
    def of(cls, order: int) -> Self:
        return cls(*parts_of_order(order))

    @property
    def order(self) -> int:
        return queue_order(self.priority, self.arrival)


class Waiting(Hashable, Protocol):
    """A request that waits."""

    @property
    def position(self) -> QueuePosition: ...

    @property
    def num_sequences(self) -> int:
        """The number of decode slots that the request needs."""


W = TypeVar("W", bound=Waiting)


class RequestQueue(Generic[W]):
    """A heap by order. Only the latest entry of a request is valid; `first` drops the others."""

    def __init__(self) -> None:
        self._latest: dict[W, int] = {}
        self._by_order: list[tuple[int, int, W]] = []
        self._num_entries = 0
        self._clock_ahead_ms = -math.inf
        """How far the clock of arrivals is ahead of the clock of `join`."""

    def __len__(self) -> int:
        return len(self._latest)

    def __contains__(self, request: W) -> bool:
        return request in self._latest

    def add(self, request: W, now: float) -> None:
        """`now`: seconds of any clock that only goes forward."""
        self._num_entries += 1
        self._latest[request] = self._num_entries
        self._clock_ahead_ms = max(self._clock_ahead_ms, request.position.arrival - 1000 * now)
        heapq.heappush(self._by_order, (request.position.order, self._num_entries, request))

    def remove(self, request: W) -> None:
        """Remove a request; does nothing if it does not wait."""
        self._latest.pop(request, None)

    def num_ahead(self, priority: int, now: float) -> int:
        """The number of sequences that go before a request of this priority that arrives now."""
        if not self._latest:
            return 0
        order = QueuePosition(priority, round(self._clock_ahead_ms + 1000 * now)).order
        return sum(each.num_sequences for each in self._latest if each.position.order < order)

    def first(self) -> W | None:
        """The first request in order, which stays in the queue; None: the queue is empty."""
        while self._by_order:
            _, entry, request = self._by_order[0]
            if self._latest.get(request) == entry:
                return request
            heapq.heappop(self._by_order)
        return None


class ServiceRate:
    """How fast requests have left the queue lately, from which retry delays follow."""

    _WINDOW = 64
    _AT_LEAST_S, _AT_MOST_S, _UNKNOWN_S = 0.1, 30.0, 1.0

    def __init__(self) -> None:
        self._departures: deque[float] = deque(maxlen=self._WINDOW)

    def count_departure(self, now: float) -> None:
        self._departures.append(now)

    def retry_delay_s(self, num_waiting: int, now: float) -> float:
        """The time in which a tenth of the waiting requests leaves the queue. Then there is room
        again, and the refused clients do not all return when the first place is free."""
        if not self._departures or now <= self._departures[0]:
            return self._UNKNOWN_S
        per_second = len(self._departures) / (now - self._departures[0])
        return min(max(num_waiting / 10 / per_second, self._AT_LEAST_S), self._AT_MOST_S)
