"""Holds the waiting requests of one model, and says which of them is next.

    class of the first request in order        `services.protocol.ticket.queue_order`
      its requests that have run before        the first in order
      otherwise: the client whose turn it is   that client's first in order

A request's order never changes, so every gateway, every worker and the store agree on it. Turns are
of this gateway alone: they let clients share the head of the queue, however many requests each has.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar

from services.gateway.request.queue_position import QueuePosition


class Waiting(Hashable, Protocol):
    """A request that waits."""

    @property
    def position(self) -> QueuePosition: ...

    @property
    def client_name(self) -> str:
        """The client with which the request takes turns."""

    @property
    def has_run(self) -> bool:
        """Whether the request was requeued: its client had its turn."""


W = TypeVar("W", bound=Waiting)

_Entry = tuple[int, int, W]
"""Of a request: its order, a number that tells equal orders apart, and the request."""


class RequestQueue(Generic[W]):
    """For each priority a ring of clients, each with a list of its requests by order. The client at
    the front of a ring has its turn; a request that leaves sends its client to the back."""

    def __init__(self) -> None:
        self._rings: dict[int, dict[str | None, list[_Entry[W]]]] = {}
        """The client None stands for all requests that have run."""
        self._places: dict[W, tuple[str | None, _Entry[W]]] = {}
        """The client and the entry under which each request waits."""
        self._num_entries = 0

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, request: W) -> bool:
        return request in self._places

    def num_of(self, client_name: str) -> int:
        """The number of a client's waiting requests."""
        return sum(request.client_name == client_name for request in self._places)

    def add(self, request: W) -> None:
        """Add a request; does nothing if it waits already."""
        if request in self._places:
            return
        self._num_entries += 1
        position = request.position
        client = None if request.has_run else request.client_name
        entry = position.order, self._num_entries, request
        self._places[request] = client, entry
        insort(self._rings.setdefault(position.priority, {}).setdefault(client, []), entry)

    def remove(self, request: W) -> None:
        """Remove a request; does nothing if it does not wait."""
        if request not in self._places:
            return
        client, entry = self._places.pop(request)
        ring = self._rings[request.position.priority]
        entries = ring.pop(client)
        del entries[bisect_left(entries, entry)]
        if entries:
            ring[client] = entries
        elif not ring:
            del self._rings[request.position.priority]

    def first(self) -> W | None:
        """The request that is next, which stays in the queue; None: the queue is empty."""
        if not self._rings:
            return None
        ring = min(
            self._rings.values(), key=lambda one: min(entries[0] for entries in one.values())
        )
        entries = ring.get(None) or next(iter(ring.values()))
        return entries[0][2]
