"""Watches the client of a request: its deadline, and whether it reads."""

import asyncio
from collections.abc import Callable

from services.gateway.output.output import Output
from services.runtime.errors import DeadlineExceeded, Overloaded


class Reading:
    """Gives a request up when its deadline has passed, or when its client reads too slowly. While
    the client is behind, backpressure is on; `on_read` is called when it has read everything."""

    def __init__(
        self, window_s: float, on_read: Callable[[], None], give_up: Callable[[Exception], None]
    ) -> None:
        self._window_s = window_s
        self._on_read = on_read
        self._give_up = give_up
        self._pause_timer: asyncio.TimerHandle | None = None
        self._deadline_timer: asyncio.TimerHandle | None = None

    @property
    def is_paused(self) -> bool:
        """Whether backpressure is on: the client has not read everything yet."""
        return self._pause_timer is not None

    def begin(self, output: Output, deadline: float | None) -> None:
        """Watch the call that reads `output`, in place of an earlier one. `deadline` is a time of
        the event loop's clock."""
        output.on_read = self.resume
        if self._deadline_timer is not None:
            self._deadline_timer.cancel()
        self._deadline_timer = None
        if deadline is not None:
            loop = asyncio.get_running_loop()
            self._deadline_timer = loop.call_at(deadline, self._deadline_passed)

    def check(self, output: Output) -> None:
        """Begin backpressure if the client is behind, and give up if it is behind by more than
        MAX_UNREAD_TOKENS."""
        if output.overflowing:
            self._cancel_slow_reader()
        elif output.congested and not self.is_paused:
            loop = asyncio.get_running_loop()
            self._pause_timer = loop.call_later(self._window_s, self._cancel_slow_reader)

    def resume(self) -> None:
        """End backpressure: the client has read everything, or another call reads in its place."""
        if self._pause_timer is not None:
            self._pause_timer.cancel()
            self._pause_timer = None
            self._on_read()

    def end(self) -> None:
        for timer in (self._deadline_timer, self._pause_timer):
            if timer is not None:
                timer.cancel()
        self._pause_timer = None

    def _cancel_slow_reader(self) -> None:
        self._give_up(Overloaded("the client reads too slowly; its request was cancelled", 0.0))

    def _deadline_passed(self) -> None:
        self._give_up(DeadlineExceeded("the request's deadline has passed"))
