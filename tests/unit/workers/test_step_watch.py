"""A worker that finishes no step ends; a slow, idle or stopped one does not."""

import asyncio
from collections.abc import Callable

import pytest

from services.worker.liveness.step_watch import watch_steps
from tests.waiting import until

LIMIT_S = 0.05


class Ended(Exception):
    pass


def watch(step_in_flight: Callable[[], int | None]) -> "asyncio.Task[None]":
    def end(limit_s: float) -> None:
        raise Ended(limit_s)

    return asyncio.create_task(watch_steps(step_in_flight, LIMIT_S, end))


async def test_a_step_without_an_end_ends_the_worker() -> None:
    with pytest.raises(Ended):
        await asyncio.wait_for(watch(lambda: 7), 10)


@pytest.mark.parametrize("steps", [[1, None], [1, 2], [None]])
async def test_running_and_waiting_engines_are_not_stuck(steps: list[int | None]) -> None:
    """Each check sees another step than the one before, or none."""
    looks = 0

    def changing() -> int | None:
        nonlocal looks
        looks += 1
        return steps[looks % len(steps)]

    watching = watch(changing)
    await until(lambda: looks >= 30)
    assert not watching.done()
    watching.cancel()
