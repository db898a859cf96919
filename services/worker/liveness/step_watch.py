"""Ends the process when a step does not come to an end: native code in an endless loop, a device
that hangs. The worker's blocks are its own, and its gateways hear from it, for as long as its
process lives: only its end lets others take over.

See ADR 73.
"""

import asyncio
import faulthandler
import os
from collections.abc import Callable
from typing import NoReturn, Protocol

from services.common.runtime.logging import get_logger
from services.common.runtime.process import EXIT_FAULT

_NUM_LOOKS = 10

log = get_logger(__name__)


class Stepping(Protocol):
    """An engine's thread."""

    @property
    def step_in_flight(self) -> int | None: ...


def end_process(limit_s: float) -> None:
    """At once, and loudly: no step can be ended from outside, nor a thread."""
    log.critical("engine_stuck", step_limit_s=limit_s)
    faulthandler.dump_traceback()
    os._exit(EXIT_FAULT)


class StepWatch:
    """Calls `end` once a step has taken `limit_s`. It is looks that are counted and not a clock: a
    process that was stopped is not blamed for the time in which it did not run."""

    def __init__(
        self, engine: Stepping, limit_s: float, end: Callable[[float], None] = end_process
    ) -> None:
        self._engine = engine
        self._limit_s = limit_s
        self._end = end

    async def keep(self) -> NoReturn:
        """Look, until cancelled."""
        seen, num_looks = None, 0
        while True:
            await asyncio.sleep(self._limit_s / _NUM_LOOKS)
            step = self._engine.step_in_flight
            num_looks = num_looks + 1 if step is not None and step == seen else 0
            seen = step
            if num_looks == _NUM_LOOKS:
                self._end(self._limit_s)
