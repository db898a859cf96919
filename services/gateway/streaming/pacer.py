"""The stream pacer: lets a few streams write in each turn of the event loop, and rests after all
waiting streams have written.

One message with the outputs of a decode step wakes all streams of the step at once. If all of them
wrote in one turn, new calls would wait: gRPC needs at least four turns to accept a call. Without
rests, streams would write in every turn. Tokens that arrive while their stream waits are written
together, so waiting saves work.

    turn | read step, wake a b c d e f | a b | accept | c d | e f | rest ... | g a b | ...
                                       '------- took t -----------'-- REST*t-'

A call that is accepted holds the streams back for some turns: another call may wait behind it, and
turns without writes are short.
"""

import asyncio
from collections import deque

STREAMS_PER_TURN = 2
REST_RATIO = 2.0
"""The length of a rest, divided by the time that the streams before it took: streams have at most a
third of the loop's time."""
SHORTEST_REST_S, LONGEST_REST_S = 0.001, 0.05
"""The event loop's timers are not finer than the shortest rest, so a shorter one is skipped. The
longest one bounds the rest after the loop was blocked."""

TURNS_PER_CALL = 5
"""For how many turns an accepted call holds streams back: gRPC accepts another one within them."""
HELD_TURNS = 50
"""For how many turns streams are held back until all that wait have written, whatever arrives."""


class StreamPacer:
    """Paces the streams of one event loop, first come, first served."""

    def __init__(
        self, streams_per_turn: int = STREAMS_PER_TURN, rest_ratio: float = REST_RATIO
    ) -> None:
        self._streams_per_turn = streams_per_turn
        self._rest_ratio = rest_ratio
        self._loop = asyncio.get_running_loop()
        self._num_passed = 0
        """Streams that may write in this turn."""
        self._began_at: float | None = None
        """When the current run of turns in which streams write began; None outside of one."""
        self._rests = False
        self._num_held = 0
        """The turns for which streams are held back now."""
        self._held_left = HELD_TURNS
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def wait(self) -> None:
        """Return when the caller's stream may write: in this turn or in a later one, never in a
        rest."""
        if self._began_at is None and not self._rests:
            self._began_at = self._loop.time()
            self._loop.call_soon(self._turn)
        if self._may_pass:
            self._num_passed += 1
            return
        turn: asyncio.Future[None] = self._loop.create_future()
        self._waiting.append(turn)
        await turn

    def hold(self) -> None:
        """Hold the streams that write or wait now back for a call that was just accepted."""
        if self._began_at is not None:
            self._num_held = min(TURNS_PER_CALL, self._held_left)

    @property
    def _may_pass(self) -> bool:
        """Whether a stream may write at once."""
        is_open = not (self._rests or self._num_held or self._waiting)
        return is_open and self._num_passed < self._streams_per_turn

    def _turn(self) -> None:
        """Let the next waiting streams write in this turn of the loop."""
        self._num_passed = 0
        if self._num_held:
            self._num_held -= 1
            self._held_left -= 1
            self._loop.call_soon(self._turn)
            return
        while self._waiting and self._num_passed < self._streams_per_turn:
            turn = self._waiting.popleft()
            if not turn.done():  # done: the stream was cancelled
                turn.set_result(None)
                self._num_passed += 1
        if self._num_passed:
            self._loop.call_soon(self._turn)
        else:
            self._end()

    def _end(self) -> None:
        """Begin a rest, since all waiting streams have written."""
        assert self._began_at is not None
        rest_s = min(self._rest_ratio * (self._loop.time() - self._began_at), LONGEST_REST_S)
        self._began_at, self._held_left = None, HELD_TURNS
        if rest_s >= SHORTEST_REST_S:
            self._rests = True
            self._loop.call_later(rest_s, self._open)

    def _open(self) -> None:
        self._rests = False
        if self._waiting:
            self._began_at = self._loop.time()
            self._turn()
