"""A request that waits for its client to read.

See ADR 64.
"""

import asyncio
from collections.abc import Callable


class Backpressure:
    """On from `begin` to `end`; after `window_s` of it, seconds, `give_up` is called."""

    def __init__(self, window_s: float, give_up: Callable[[], None]) -> None:
        self._window_s = window_s
        self._give_up = give_up
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_on(self) -> bool:
        return self._timer is not None

    def begin(self) -> None:
        """Again: no error, and no more time."""
        if self._timer is None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(self._window_s, self._give_up)

    def end(self) -> None:
        """What is not on is no error."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
