"""The bound of messages that arrive slowly."""

import asyncio
import time
from typing import Any

import pytest

from services.runtime.errors import Overloaded
from services.runtime.rpc.arrivals import MAX_SLOW, Arrivals


class Call:
    """A call whose message comes when `message` gets it."""

    def __init__(self) -> None:
        self.message: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def read(self) -> bytes:
        return await self.message


async def start(arrivals: Arrivals, number: int) -> tuple[list[Call], list[asyncio.Task[bytes]]]:
    calls: list[Any] = [Call() for _ in range(number)]
    reading = [asyncio.create_task(arrivals.message(call)) for call in calls]
    await asyncio.sleep(0)
    return calls, reading


async def test_the_longest_waiting_call_gives_way() -> None:
    calls, reading = await start(Arrivals(0.01), MAX_SLOW + 1)
    with pytest.raises(Overloaded, match=r"16 other messages take longer than 0.01 s"):
        await reading[0]
    for call in calls[1:]:
        call.message.set_result(b"late")
    assert await asyncio.gather(*reading[1:]) == [b"late"] * MAX_SLOW


async def test_calls_do_not_give_way_because_the_event_loop_was_busy() -> None:
    """Their messages arrived in time, but the loop sees its timers first."""
    calls, reading = await start(Arrivals(0.2), 3 * MAX_SLOW)

    def arrive(num_turns: int) -> None:
        if num_turns:
            asyncio.get_running_loop().call_soon(arrive, num_turns - 1)
            return
        for call in calls:
            call.message.set_result(b"here")

    arrive(num_turns=3)
    time.sleep(0.3)  # noqa: ASYNC251  # a busy loop
    assert await asyncio.gather(*reading) == [b"here"] * len(calls)
