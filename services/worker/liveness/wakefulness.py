"""Notices that this process did not run for a while: it was stopped, swapped out, or starved.

Meanwhile its gateways may have left it, and the block manager may have fenced it. A fenced worker
keeps its blocks until it releases them, so the step in which it was stopped does no harm. Before
the next step the worker asks the store whether it was fenced.

    step | step | st......stopped......ep | fenced? | step

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
"""A longer gap makes the worker ask the store. Far shorter than the time after which a worker is
fenced."""
_BEAT_S = 0.5

log = get_logger(__name__)


class Wakefulness:
    """Measures gaps between beats of the event loop, and holds back the engine after a long one.

    `ask` returns if this worker may go on, and raises if not. `clock`: seconds since any moment.
    """

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
        """Record that the process runs; after a gap, call `ask` first."""
        if self._gap_s > GAP_S:
            log.warning("was_asleep", gap_s=round(self._gap_s, 3))
            self._asking = True  # before anything else: the engine thread may be about to look
            await self._ask()
        with self._changed:
            self._awake_at, self._asking = self._clock(), False
            self._changed.notify_all()

    def may_step(self) -> bool:
        """Wait in the engine thread, before a step, until the worker may go on; False after
        `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._may_go_on)
            return not self._closed

    def close(self) -> None:
        """Let no step begin any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def _may_go_on(self) -> bool:
        return not self._asking and self._gap_s <= GAP_S

    @property
    def _gap_s(self) -> float:
        return self._clock() - self._awake_at
