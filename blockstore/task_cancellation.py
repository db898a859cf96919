"""Cancels tasks that use redis-py's connections or gRPC's streams."""

import asyncio

_RETRY_INTERVAL_S = 0.1


async def cancel_task(task: "asyncio.Task[None]") -> None:
    """Cancel a task, and return when it has ended, with any result. Cancels repeatedly: Python
    3.11's `wait_for`, with which redis-py writes, loses a cancellation that arrives when the
    connection has just broken, and gRPC loses one that arrives when a stream has just failed."""
    while not task.done():
        task.cancel()
        await asyncio.wait([task], timeout=_RETRY_INTERVAL_S)
    if not task.cancelled():
        task.exception()  # retrieve it, so that asyncio does not log it
