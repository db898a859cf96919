"""Ends the process if a step does not end: native code in an endless loop, or a device that hangs.

While the process lives, the worker keeps its blocks and its gateways get its load reports. Only the
end of the process lets other workers take over.

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
    """An engine thread. `step_in_flight`: the number of the step that runs, or None."""

    @property
    def step_in_flight(self) -> int | None: ...


def end_process(limit_s: float) -> None:
    """End the process at once, with the stacks of its threads on stderr: neither a step nor a
    thread can be ended from outside."""
    log.critical("engine_stuck", step_limit_s=limit_s)
    faulthandler.dump_traceback()
    os._exit(EXIT_FAULT)


class StepWatch:
    """Calls `end` if the same step is in flight at `_NUM_LOOKS` looks in a row, spread over
    `limit_s`. It counts looks instead of reading a clock, so that the time in which the process was
    stopped does not count."""

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
