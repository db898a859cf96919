"""The line of waiting requests, served by `services.protocol.ticket.place_in_line`.

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
    """Where a request stands: its priority, and its arrival by the registry's clock in ms."""

    priority: int
    arrival: int

    @classmethod
    def of(cls, order: int) -> Self:
        return cls(*parts_of_order(order))

    @property
    def order(self) -> int:
        return queue_order(self.priority, self.arrival)


class Waiting(Hashable, Protocol):
    """A request that stands in line."""

    @property
    def position(self) -> QueuePosition: ...

    @property
    def num_sequences(self) -> int:
        """For which it wants slots."""


W = TypeVar("W", bound=Waiting)


class RequestQueue(Generic[W]):
    """A heap by order. An entry that is not its request's latest is void; the line drops it when
    it comes up."""

    def __init__(self) -> None:
        self._latest: dict[W, int] = {}
        self._by_order: list[tuple[int, int, W]] = []
        self._num_entries = 0
        self._clock_ahead_ms = -math.inf
        """How far the clock of arrivals is ahead of the clock of `join`."""

    def __len__(self) -> int:
        return len(self._latest)

    def __contains__(self, who: W) -> bool:
        return who in self._latest

    def join(self, who: W, now: float) -> None:
        """`now`: seconds of any clock that only goes forward."""
        self.leave(who)
        self._num_entries += 1
        self._latest[who] = self._num_entries
        self._clock_ahead_ms = max(self._clock_ahead_ms, who.position.arrival - 1000 * now)
        heapq.heappush(self._by_order, (who.position.order, self._num_entries, who))

    def leave(self, who: W) -> None:
        """A request that does not stand in line is no error."""
        self._latest.pop(who, None)

    def num_ahead(self, priority: int, now: float) -> int:
        """How many sequences a request of this priority that arrives now would find before it."""
        if not self._latest:
            return 0
        order = QueuePosition(priority, round(self._clock_ahead_ms + 1000 * now)).order
        return sum(who.num_sequences for who in self._latest if who.position.order < order)

    def first(self) -> W | None:
        """The first in order; stays in line. None: the line is empty."""
        while self._by_order:
            _, entry, who = self._by_order[0]
            if self._latest.get(who) == entry:
                return who
            heapq.heappop(self._by_order)
        return None


class ServiceRate:
    """How fast the line has moved lately, for telling a client when to come again."""

    _WINDOW = 64
    _AT_LEAST_S, _AT_MOST_S, _UNKNOWN_S = 0.1, 30.0, 1.0

    def __init__(self) -> None:
        self._departures: deque[float] = deque(maxlen=self._WINDOW)

    def departed(self, now: float) -> None:
        self._departures.append(now)

    def retry_delay_s(self, num_waiting: int, now: float) -> float:
        """The time in which a tenth of those who wait now will have gone: there is room again then,
        and not everybody who was turned away comes at the same moment as the first free place."""
        if not self._departures or now <= self._departures[0]:
            return self._UNKNOWN_S
        per_second = len(self._departures) / (now - self._departures[0])
        return min(max(num_waiting / 10 / per_second, self._AT_LEAST_S), self._AT_MOST_S)
