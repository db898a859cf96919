"""Merges the deltas of several prompts into one stream."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

T = TypeVar("T")

_MAX_UNREAD = 16


async def merged(
    streams: Sequence[AbstractAsyncContextManager[AsyncIterator[T]]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Opens all streams, and yields their items as they come, each with the number of its stream.

    Raises the first error of a stream. After an error, and when this generator is closed, all
    streams are closed. Several streams run in one task each.
    """
    if len(streams) == 1:
        async with streams[0] as items:
            async for item in items:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | Exception | None] = asyncio.Queue(_MAX_UNREAD)
    tasks = [asyncio.create_task(_pump(*numbered, queue)) for numbered in enumerate(streams)]
    num_running = len(tasks)
    try:
        while num_running:
            entry = await queue.get()
            if isinstance(entry, Exception):
                raise entry
            if entry is None:
                num_running -= 1
            else:
                yield entry
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    number: int,
    stream: AbstractAsyncContextManager[AsyncIterator[T]],
    queue: asyncio.Queue[tuple[int, T] | Exception | None],
) -> None:
    """Puts the items of a stream into `queue`, then its error, or None at its end."""
    try:
        async with stream as items:
            async for item in items:
                await queue.put((number, item))
        await queue.put(None)
    except Exception as error:
        await queue.put(error)
