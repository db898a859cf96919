"""A worker that finishes no step ends; a slow, idle or stopped one does not."""

import asyncio
from dataclasses import dataclass

import pytest

from services.worker.liveness.step_watch import Stepping, watch_steps
from tests.waiting import until

LIMIT_S = 0.05


@dataclass
class Engine:
    step_in_flight: int | None = None


class Ended(Exception):
    pass


def watch(engine: Stepping) -> "asyncio.Task[None]":
    def end(limit_s: float) -> None:
        raise Ended(limit_s)

    return asyncio.create_task(watch_steps(engine, LIMIT_S, end))


async def test_a_step_without_an_end_ends_the_worker() -> None:
    with pytest.raises(Ended):
        await asyncio.wait_for(watch(Engine(step_in_flight=7)), 10)


@pytest.mark.parametrize("steps", [[1, None], [1, 2], [None]])
async def test_running_and_waiting_engines_are_not_stuck(steps: list[int | None]) -> None:
    """Each check sees another step than the one before, or none."""
    looks = 0

    class Changing:
        @property
        def step_in_flight(self) -> int | None:
            nonlocal looks
            looks += 1
            return steps[looks % len(steps)]

    watching = watch(Changing())
    await until(lambda: looks >= 30)
    assert not watching.done()
    watching.cancel()
