"""The end of a task that talks to the server."""

import asyncio

_AGAIN_S = 0.1


async def end(task: "asyncio.Task[None]") -> None:
    """Cancel it, and return when it has ended, however it did. It is cancelled again and again:
    Python 3.11's `wait_for`, which redis-py writes with, loses a cancellation that comes when the
    connection has just broken."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_AGAIN_S)
    if not task.cancelled():
        task.exception()  # of no interest any more
