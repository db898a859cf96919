"""Ends the process if a step does not end: native code in an endless loop, or a device that hangs.

While the process lives, the worker keeps its blocks and its gateways get its load reports. Only the
end of the process lets other workers take over.
"""

import asyncio
import faulthandler
import os
from collections.abc import Callable
from typing import NoReturn

from services.runtime.logging import get_logger
from services.runtime.process import EXIT_FAULT

_NUM_CHECKS = 10

log = get_logger(__name__)


def end_process(limit_s: float) -> None:
    """End the process at once, with the stacks of its threads on stderr: neither a step nor a
    thread can be ended from outside."""
    log.critical("engine_stuck", step_limit_s=limit_s)
    faulthandler.dump_traceback()
    os._exit(EXIT_FAULT)


async def watch_steps(
    step_in_flight: Callable[[], int | None],
    limit_s: float,
    end: Callable[[float], None] = end_process,
) -> NoReturn:
    """Call `end` if the same step is in flight at `_NUM_CHECKS` checks in a row, spread over
    `limit_s`. A clock would also count the time in which the process was stopped."""
    last_step, num_checks = None, 0
    while True:
        await asyncio.sleep(limit_s / _NUM_CHECKS)
        step = step_in_flight()
        num_checks = num_checks + 1 if step is not None and step == last_step else 0
        last_step = step
        if num_checks == _NUM_CHECKS:
            end(limit_s)
