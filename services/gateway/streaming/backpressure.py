"""Limits how long a request waits for a client that does not read. See ADR 64."""

import asyncio
from collections.abc import Callable


class Backpressure:
    """The backpressure of one request: on from `begin` to `end`. If it lasts `window_s` seconds, it
    calls `give_up`."""

    def __init__(self, window_s: float, give_up: Callable[[], None]) -> None:
        self._window_s = window_s
        self._give_up = give_up
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_on(self) -> bool:
        return self._timer is not None

    def begin(self) -> None:
        """Start the window. A second call neither fails nor extends the window."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._window_s, self._give_up)

    def end(self) -> None:
        """Stop the window; does nothing if it is not on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
