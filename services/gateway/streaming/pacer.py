"""Lets streams out a few in each turn of the event loop, and when all that waited are out, keeps
the next ones waiting for a while.

All that a decode worker's step has for its streams comes in one message, and wakes all of them at
once. Written out in one turn they keep whatever else is to be answered waiting, and gRPC accepts a
call in no less than four turns; written out step after step they leave no turn without them. What
comes for a stream while it waits is written with it: a wait costs no work, it saves some.

    turn | read step, wake a b c d e f | a b | accept | c d | e f | rest ... | g a b | ...
                                       '------- took t -----------'-- REST*t-'

See ADR 86.
"""

import asyncio
from collections import deque

AT_ONCE = 2
REST = 2.0
"""Times as long as those before took to get out: streams have at most a third of the time."""
SHORTEST_REST_S, LONGEST_REST_S = 0.001, 0.05
"""A timer of the loop is no finer. One that stood still does not make up for it."""


class StreamPacer:
    """Of one event loop. First come, first served."""

    def __init__(self, at_once: int = AT_ONCE, rest: float = REST) -> None:
        self._at_once = at_once
        self._rest = rest
        self._loop = asyncio.get_running_loop()
        self._num_passed = 0
        """In this turn."""
        self._began_at: float | None = None
        """Since when some are let out, turn after turn."""
        self._rests = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Return in this turn, or in one of the next that is no rest."""
        if self._began_at is None and not self._rests:
            self._began_at = self._loop.time()
            self._loop.call_soon(self._turn)
        if not self._rests and self._num_passed < self._at_once and not self._waiting:
            self._num_passed += 1
            return
        turn: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(turn)
        await turn

    def _turn(self) -> None:
        """Another turn of the loop: the next of those that wait go on in it."""
        self._num_passed = 0
        while self._waiting and self._num_passed < self._at_once:
            turn = self._waiting.popleft()
            if not turn.done():  # its stream was cancelled
                turn.set_result(None)
                self._num_passed += 1
        if self._num_passed:
            self._loop.call_soon(self._turn)
        else:
            self._end()

    def _end(self) -> None:
        """All are out."""
        assert self._began_at is not None
        rest_s = min(self._rest * (self._loop.time() - self._began_at), LONGEST_REST_S)
        self._began_at = None
        if rest_s >= SHORTEST_REST_S:
            self._rests = True
            self._loop.call_later(rest_s, self._open)

    def _open(self) -> None:
        self._rests = False
        if self._waiting:
            self._began_at = self._loop.time()
            self._turn()
