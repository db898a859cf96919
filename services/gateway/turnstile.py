"""Lets a few through in each turn of the event loop, and the others in the turns after it.

All that a decode worker's step has for its streams comes in one message, and wakes all of them at
once. Written out in one turn, some milliseconds on a busy host, it keeps whatever else is to be
answered waiting; and gRPC accepts a call in no less than two turns, one call after another.

    turn    | read step, wake a b c d e f | a b | accept | c d | e f | ...
"""

import asyncio
from collections import deque

AT_ONCE = 2


class Turnstile:
    """Of one event loop. First come, first served."""

    def __init__(self, at_once: int = AT_ONCE) -> None:
        self._at_once = at_once
        self._num_passed = 0
        """In this turn."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Return in this turn, or in one of the next."""
        loop = asyncio.get_running_loop()
        if not self._num_passed:
            loop.call_soon(self._turn)
        if self._num_passed < self._at_once and not self._waiting:
            self._num_passed += 1
            return
        turn: asyncio.Future[None] = loop.create_future()
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
            asyncio.get_running_loop().call_soon(self._turn)
