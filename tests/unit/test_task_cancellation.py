"""The cancellation of a task that waits for the server."""

import asyncio

from blockstore.task_cancellation import cancel_task


async def test_a_task_that_loses_a_cancellation_ends_all_the_same() -> None:
    began, lost = asyncio.Event(), asyncio.Event()

    async def run() -> None:
        began.set()
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if lost.is_set():
                    raise
                lost.set()

    task = asyncio.create_task(run())
    await began.wait()
    async with asyncio.timeout(10):
        await cancel_task(task)
    assert lost.is_set()
    assert task.cancelled()


async def test_a_failed_task_has_ended() -> None:
    async def fail() -> None:
        raise ValueError

    await cancel_task(asyncio.create_task(fail()))
