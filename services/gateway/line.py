"""The line of waiting requests: (priority class, arrival), one class up for every 30 s of waiting.

Law 8: lower goes first, arrival is the registry's counter, and who waits long enough rises past
every class. A request that comes back keeps its arrival and the class that it has risen to.
"""

import heapq
from collections import Counter, deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, Protocol, Self, TypeVar

from services.common.ticket import PRIORITY_CLASSES, parts_of_order, place_in_line

RISE_EVERY_S = 30.0


@dataclass(slots=True)
class Place:
    """Where a request stands. Its order goes into every ticket, so that workers and store see the
    same one as the line; only the line changes it."""

    priority: int
    arrival: int

    @classmethod
    def of(cls, order: int) -> Self:
        return cls(*parts_of_order(order))

    @property
    def order(self) -> int:
        return place_in_line(self.priority, self.arrival)


class Waiting(Hashable, Protocol):
    """Who stands in line."""

    @property
    def place(self) -> Place: ...

    @property
    def num_sequences(self) -> int:
        """For which it wants slots."""


W = TypeVar("W", bound=Waiting)


class Line(Generic[W]):
    """Times are those of any clock that only goes forward, in seconds.

    Two heaps: by order, and by the time of the next rise. An entry that is not its owner's latest
    is void; it is dropped when it comes up.
    """

    def __init__(self) -> None:
        self._latest: dict[W, int] = {}
        self._num_sequences: dict[W, int] = {}
        self._by_order: list[tuple[int, int, W]] = []
        self._by_rise: list[tuple[float, int, W]] = []
        self._num_entries = 0
        self._of_class: Counter[int] = Counter()

    def __len__(self) -> int:
        return len(self._latest)

    def __contains__(self, who: W) -> bool:
        return who in self._latest

    def join(self, who: W, now: float) -> None:
        self.leave(who)
        self._num_entries += 1
        self._latest[who] = self._num_entries
        self._num_sequences[who] = who.num_sequences
        self._of_class[who.place.priority] += who.num_sequences
        heapq.heappush(self._by_order, (who.place.order, self._num_entries, who))
        if who.place.priority > PRIORITY_CLASSES.start:
            heapq.heappush(self._by_rise, (now + RISE_EVERY_S, self._num_entries, who))

    def leave(self, who: W) -> None:
        """Who does not stand in line is no error."""
        if self._latest.pop(who, None) is not None:
            self._of_class[who.place.priority] -= self._num_sequences.pop(who)

    def num_ahead(self, priority: int) -> int:
        """How many sequences a new request of this class would find before it."""
        return sum(number for cls, number in self._of_class.items() if cls <= priority)

    def first(self, now: float) -> W | None:
        """Who is first in order; stays in line. None: nobody waits."""
        self._raise_the_patient(now)
        while self._by_order:
            _, entry, who = self._by_order[0]
            if self._latest.get(who) == entry:
                return who
            heapq.heappop(self._by_order)
        return None

    def _raise_the_patient(self, now: float) -> None:
        while self._by_rise and self._by_rise[0][0] <= now:
            due, entry, who = heapq.heappop(self._by_rise)
            if self._latest.get(who) == entry:
                self.leave(who)
                who.place.priority -= 1
                self.join(who, due)


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
