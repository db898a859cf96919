"""A process that did not run asks whether it may go on, before it touches anything."""

import asyncio
import threading

import pytest

from blockstore.errors import WorkerFenced
from services.worker.liveness.wakefulness import GAP_S, Wakefulness


class Stopped:
    """A worker in a process that a test stops, by moving the clock on."""

    def __init__(self) -> None:
        self.now = 100.0
        self.num_asked = 0
        self.answered = asyncio.Event()
        self.error: Exception | None = None
        self.wakefulness = Wakefulness(self._ask, clock=lambda: self.now)
        self.steps: list[bool] = []

    async def _ask(self) -> None:
        self.num_asked += 1
        await self.answered.wait()
        if self.error:
            raise self.error

    def step(self) -> threading.Thread:
        """As the engine's thread does it."""

        def run() -> None:
            self.steps.append(self.wakefulness.may_step())

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


async def test_the_lock_is_not_read_while_steps_run() -> None:
    worker = Stopped()
    for _ in range(3):
        worker.now += GAP_S
        await worker.wakefulness.beat()
        assert worker.wakefulness.may_step()
    assert worker.num_asked == 0


@pytest.mark.parametrize("engine_first", [True, False])
async def test_no_step_begins_after_a_gap_before_the_answer(engine_first: bool) -> None:
    """Whichever thread wakes first."""
    worker = Stopped()
    worker.now += GAP_S + 0.01
    if engine_first:
        thread = worker.step()
    beating = asyncio.create_task(worker.wakefulness.beat())
    await asyncio.sleep(0)
    if not engine_first:
        thread = worker.step()
    assert worker.num_asked == 1
    thread.join(0.05)
    assert worker.steps == []
    worker.answered.set()
    await beating
    await asyncio.to_thread(thread.join, 5)
    assert worker.steps == [True]


async def test_a_fenced_worker_steps_no_more_but_can_end() -> None:
    worker = Stopped()
    worker.error = WorkerFenced("decode-1 was fenced")
    worker.answered.set()
    worker.now += 60
    thread = worker.step()
    with pytest.raises(WorkerFenced):
        await worker.wakefulness.keep()
    thread.join(0.05)
    assert worker.steps == []
    worker.wakefulness.close()
    await asyncio.to_thread(thread.join, 5)
    assert worker.steps == [False]
