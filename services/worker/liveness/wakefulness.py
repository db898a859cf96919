"""Notices that this process did not run for a while: it was stopped, swapped out, or starved.

Others have given it up meanwhile, and the block manager may have fenced it. Its blocks stay its own
until it lets go of them, so the step in which it was stopped does no harm. Before the next one it
asks.

    step | step | st......stopped......ep | asks: fenced? | step

See ADR 56.
"""

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import NoReturn

from services.common.runtime.logging import get_logger
from services.common.runtime.ticks import until_tick

GAP_S = 1.0
"""Far less than it takes others to fence somebody."""
_BEAT_S = 0.5

log = get_logger(__name__)


class Wakefulness:
    """`ask` returns if this worker may go on, and raises if not. `clock`: seconds from anywhere."""

    def __init__(
        self, ask: Callable[[], Awaitable[None]], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._ask = ask
        self._clock = clock
        self._changed = threading.Condition()
        self._awake_at = clock()
        self._asking = False
        self._closed = False

    async def keep(self) -> NoReturn:
        """Beat in the event loop, until cancelled. Raises what `ask` raises."""
        while True:
            await self.beat()
            await asyncio.sleep(until_tick(_BEAT_S))

    async def beat(self) -> None:
        if self._gap_s > GAP_S:
            log.warning("was_asleep", gap_s=round(self._gap_s, 3))
            self._asking = True  # the first thing of all: the other thread may be about to look
            await self._ask()
        with self._changed:
            self._awake_at, self._asking = self._clock(), False
            self._changed.notify_all()

    def may_step(self) -> bool:
        """Before a step, in the engine's thread: waits until it is known."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._may_go_on)
            return not self._closed

    def close(self) -> None:
        """No step any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def _may_go_on(self) -> bool:
        return not self._asking and self._gap_s <= GAP_S

    @property
    def _gap_s(self) -> float:
        return self._clock() - self._awake_at
