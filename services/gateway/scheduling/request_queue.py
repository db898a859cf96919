"""Holds the waiting requests of one model, and says which of them is next.

    class of the first request in order        `services.protocol.ticket.queue_order`
      its requests that have run before        the first in order
      otherwise: the client whose turn it is   that client's first in order

A request's order never changes, so every gateway, every worker and the store agree on it. Turns are
of this gateway alone: they let clients share the head of the queue, however many requests each has.
"""

from bisect import bisect_left, insort
from typing import Generic, TypeVar

from services.protocol.ticket import parts_of_order

R = TypeVar("R")

_Entry = tuple[int, int, R]
"""Of a request: its order, a number that tells equal orders apart, and the request."""


class RequestQueue(Generic[R]):
    """For each priority a ring of clients, each with a list of its requests by order. The client at
    the front of a ring has its turn; a request that leaves sends its client to the back."""

    def __init__(self) -> None:
        self._rings: dict[int, dict[str | None, list[_Entry[R]]]] = {}
        """The client None stands for all requests that have run."""
        self._places: dict[R, tuple[str, str | None, _Entry[R]]] = {}
        """Of each request its client, and the client and the entry under which it waits."""
        self._num_entries = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request: R) -> bool:
        return request in self._places

    def num_of(self, client: str) -> int:
        """The number of a client's waiting requests."""
        return sum(one == client for one, _, _ in self._places.values())

    def add(self, request: R, order: int, client: str, *, has_run: bool = False) -> None:
        """Add a request; does nothing if it waits already. Its client has had its turn if the
        request `has_run`."""
        if request in self._places:
            return
        self._num_entries += 1
        entry = order, self._num_entries, request
        turn = None if has_run else client
        self._places[request] = client, turn, entry
        priority, _ = parts_of_order(order)
        insort(self._rings.setdefault(priority, {}).setdefault(turn, []), entry)

    def remove(self, request: R) -> None:
        """Remove a request; does nothing if it does not wait."""
        if request not in self._places:
            return
        _, turn, entry = self._places.pop(request)
        priority, _ = parts_of_order(entry[0])
        ring = self._rings[priority]
        entries = ring.pop(turn)
        del entries[bisect_left(entries, entry)]
        if entries:
            ring[turn] = entries
        elif not ring:
            del self._rings[priority]

    def first(self) -> R | None:
        """The request that is next, which stays in the queue; None if the queue is empty."""
        if not self._rings:
            return None
        ring = min(
            self._rings.values(), key=lambda one: min(entries[0] for entries in one.values())
        )
        entries = ring.get(None) or next(iter(ring.values()))
        return entries[0][2]
