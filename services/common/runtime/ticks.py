"""Ticks of an event loop's clock: periodic work that is due with a tick wakes the process once.

To wake an idle process, whose caches are cold, costs several times what most of that work costs.
"""

import asyncio


def until_tick(interval_s: float) -> float:
    """Seconds until a multiple of `interval_s`: the next one, unless that is almost now."""
    left_s = interval_s - asyncio.get_running_loop().time() % interval_s
    return left_s if left_s > interval_s / 4 else left_s + interval_s
