"""Rests between the writes of streams, in which their tokens gather.

All streams of a step have new text at the same time. A busy gateway that wrote each token by itself
would take twice the time for a token, and new calls would wait behind the writes.

    loop | read step | write a b c d e f | rest ............ | write a b c d e f | ...
                     '------- took t ----'-- RATIO * t -------'
"""

import asyncio

RATIO = 2.0
"""The length of a rest, divided by the time of the writes before it: writes have at most a third of
the loop's time."""
SHORTEST_S, LONGEST_S = 0.001, 0.05
"""The event loop's timers are not finer than the shortest rest, so a shorter one is left out. The
longest one bounds the rest after the loop was blocked."""


class WriteRests:
    """The rests of one event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began_at: float | None = None
        """When the writes of this turn of the loop began; None before the first one."""
        self._rest: asyncio.Event | None = None
        """Is set at the end of the rest; None outside of one."""

    async def wait(self) -> None:
        """Return when the caller's stream may write: at once, or after the rest."""
        while self._rest is not None:
            await self._rest.wait()
        if self._began_at is None:
            self._began_at = self._loop.time()
            self._loop.call_soon(self._end_writes)

    def _end_writes(self) -> None:
        """Begin a rest in the turn after the writes, if it is long enough."""
        assert self._began_at is not None
        rest_s = min(RATIO * (self._loop.time() - self._began_at), LONGEST_S)
        self._began_at = None
        if rest_s >= SHORTEST_S:
            self._rest = asyncio.Event()
            self._loop.call_later(rest_s, self._end_rest)

    def _end_rest(self) -> None:
        assert self._rest is not None
        rest, self._rest = self._rest, None
        rest.set()
