"""Ticks of an event loop's clock: all periodic work that is due with a tick wakes the process once.

To wake an idle process, whose caches are cold, costs several times as much as most of that work.
"""

import asyncio


def until_tick(interval_s: float) -> float:
    """Seconds until the next multiple of `interval_s` on the loop's clock, or until the one after
    it if at most a quarter of the interval is left."""
    left_s = interval_s - asyncio.get_running_loop().time() % interval_s
    return left_s if left_s > interval_s / 4 else left_s + interval_s
