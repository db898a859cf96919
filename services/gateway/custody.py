"""Who computes a request just now, and whether workers died over it before.

A worker that dies says not why. Every request that was there is a suspect, for workers of that
role, until it has got a token from one of them again; suspects go to a worker one at a time, so
that a second death is over one alone. A request that makes progress is never given up, however
often workers die.

    free ──worker dies──▶ suspected ──worker dies again──▶ convicted
      ▲                       │
      └────── a token ────────┘
"""

from collections.abc import Callable

from blockstore.registry import Role
from services.gateway.worker import Worker


class Custody:
    """Of one request, over all its attempts."""

    def __init__(self) -> None:
        self._suspected: set[Role] = set()
        self._worker: Worker | None = None
        self._send: Callable[[], None] = lambda: None
        self._is_there = False

    def hand_to(self, worker: Worker, send: Callable[[], None]) -> None:
        """`send` the request to `worker`: now, or when the suspects before it there are through."""
        self.take_back()
        self._worker, self._send = worker, send
        if worker.member.role in self._suspected:
            worker.trials.enter(self)
        else:
            self.begin()

    def begin(self) -> None:
        """A turn that comes because the worker has died is none."""
        if self._worker is not None and self._worker.connected:
            self._is_there = True
            self._send()

    def take_back(self) -> None:
        """It is nowhere."""
        worker, self._worker = self._worker, None
        self._is_there = False
        if worker is not None:
            worker.trials.leave(self)

    def got_token(self, worker: Worker) -> None:
        self._suspected.discard(worker.member.role)
        worker.trials.leave(self)

    def convicted_by(self, lost: Worker) -> bool:
        """Take note of a death; whether it is the second one over this request in a row."""
        if lost is not self._worker or not self._is_there:
            return False
        again = lost.member.role in self._suspected
        self._suspected.add(lost.member.role)
        return again
