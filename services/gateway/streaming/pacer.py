"""The stream pacer: lets a few streams write in each turn of the event loop, and rests after all
waiting streams have written.

One message with the outputs of a decode step wakes all streams of the step at once. If all of them
wrote in one turn, new calls would wait: gRPC needs at least four turns to accept a call. Without
rests, streams would write in every turn. Tokens that arrive while their stream waits are written
together, so waiting saves work.

    turn | read step, wake a b c d e f | a b | accept | c d | e f | rest ... | g a b | ...
                                       '------- took t -----------'-- REST*t-'

See ADR 86.
"""

import asyncio
from collections import deque

AT_ONCE = 2
REST = 2.0
"""The length of a rest in multiples of the time that the streams before it took, so that streams
have at most a third of the loop's time."""
SHORTEST_REST_S, LONGEST_REST_S = 0.001, 0.05
"""The event loop's timers are not finer than the shortest rest, so a shorter one is skipped. The
longest one keeps streams from resting for a loop that stood still."""


class StreamPacer:
    """Paces the streams of one event loop, first come, first served."""

    def __init__(self, at_once: int = AT_ONCE, rest: float = REST) -> None:
        self._at_once = at_once
        self._rest = rest
        self._loop = asyncio.get_running_loop()
        self._num_passed = 0
        """Streams that may write in this turn."""
        self._began_at: float | None = None
        """When the current run of turns in which streams write began; None outside of one."""
        self._rests = False
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Return when the caller's stream may write: in this turn or in a later one, never in a
        rest."""
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
        """Let the next waiting streams write in this turn of the loop."""
        self._num_passed = 0
        while self._waiting and self._num_passed < self._at_once:
            turn = self._waiting.popleft()
            if not turn.done():  # done: the stream was cancelled
                turn.set_result(None)
                self._num_passed += 1
        if self._num_passed:
            self._loop.call_soon(self._turn)
        else:
            self._end()

    def _end(self) -> None:
        """Begin a rest: all waiting streams have written."""
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
