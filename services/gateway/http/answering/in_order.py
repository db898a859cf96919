"""Answers the inputs of one body, several at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

R = TypeVar("R")
T = TypeVar("T")


async def in_order(
    answer: Callable[[R], Awaitable[T]], requests: Iterable[R], at_once: int
) -> list[T]:
    """The answers to all requests, in their order. `at_once` run at a time. The first error ends
    all."""
    places = asyncio.Semaphore(at_once)

    async def one(request: R) -> T:
        async with places:
            return await answer(request)

    tasks = [asyncio.create_task(one(request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
