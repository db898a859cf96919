"""Streams rest after they have written: for longer if their writes took longer."""

import asyncio
import contextlib

import pytest

from services.gateway.output.rests import LONGEST_S, RATIO, WriteRests
from tests.property.late import VirtualLoop


def writes(*takes_s: float) -> list[float]:
    """When each write began, of streams that write twice; each write takes a stream's time."""

    async def run() -> list[float]:
        rests, found = WriteRests(), list[float]()

        async def stream(write_s: float) -> None:
            for _ in range(2):
                await rests.wait()
                found.append(loop.now)
                loop.now += write_s
                await asyncio.sleep(0)

        async with asyncio.TaskGroup() as tasks:
            for write_s in takes_s:
                tasks.create_task(stream(write_s))
        return found

    with contextlib.closing(VirtualLoop()) as loop:
        return loop.run_until_complete(run())


def test_all_streams_write_and_then_rest_for_twice_the_time() -> None:
    second = 0.012 * (1 + RATIO)
    expected = [0.0, 0.004, 0.008, second, second + 0.004, second + 0.008]
    assert writes(0.004, 0.004, 0.004) == pytest.approx(expected)


def test_writes_of_no_time_need_no_rest() -> None:
    assert writes(0.0001, 0.0001) == pytest.approx([0.0, 0.0001, 0.0002, 0.0003])


def test_a_rest_has_a_limit() -> None:
    """Also if the loop was blocked for seconds."""
    assert writes(2.0) == pytest.approx([0.0, 2.0 + LONGEST_S])
