"""Merges several async generators into one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

_MAX_UNREAD = 16


@dataclass(frozen=True, slots=True)
class _Ended:
    error: Exception | None


async def merged(
    streams: Sequence[AsyncGenerator[T, None]],
) -> AsyncGenerator[tuple[int, T], None]:
    """Yields the items of all streams as they come, each with the number of its stream.

    Raises the first error of a stream. After an error, and when this generator is closed, all
    streams are closed. Several streams run in one task each.
    """
    if len(streams) == 1:
        async with aclosing(streams[0]) as stream:
            async for item in stream:
                yield 0, item
        return
    queue: asyncio.Queue[tuple[int, T] | _Ended] = asyncio.Queue(_MAX_UNREAD)
    tasks = [asyncio.create_task(_pump(*numbered, queue)) for numbered in enumerate(streams)]
    num_running = len(tasks)
    try:
        while num_running:
            entry = await queue.get()
            if not isinstance(entry, _Ended):
                yield entry
                continue
            if entry.error is not None:
                raise entry.error
            num_running -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _pump(
    number: int,
    stream: AsyncGenerator[T, None],
    queue: asyncio.Queue[tuple[int, T] | _Ended],
) -> None:
    error: Exception | None = None
    try:
        async with aclosing(stream):
            async for item in stream:
                await queue.put((number, item))
    except Exception as raised:
        error = raised
    await queue.put(_Ended(error))
