"""The engine's thread: which commands it gets with which step, and when the outcome is reported."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from services.engine.batch import Wait
from services.engine.messages import (
    AbortSequence,
    AddBlocks,
    Admit,
    Command,
    Remove,
    RetiredStep,
    Start,
    StepOutcome,
)
from services.engine.sequences.results import Advance
from services.engine.thread import EngineThread
from services.protocol.ticket import GroupState
from tests.waiting import until


class FakeEngine:
    """An engine without work. `received`: the commands of each call. `waits_for`: how many commands
    it wants before a step."""

    def __init__(self, waits_for: int = 0) -> None:
        self.received: list[list[Command]] = []
        self.outcomes: list[StepOutcome] = []
        self.waits_for = waits_for
        self.at_steps: list[int] = []
        self.is_settled = False

    def apply(self, commands: Sequence[Command]) -> tuple[Advance, ...]:
        self.received.append(list(commands))
        removed = (command for command in commands if isinstance(command, Remove))
        return tuple(Advance(command.key, remaining=GroupState(())) for command in removed)

    @property
    def num_received(self) -> int:
        return sum(map(len, self.received))

    def delay_s(self, waited_s: float) -> float:
        return 10.0 - waited_s if self.num_received < self.waits_for else 0.0

    def step(self) -> StepOutcome:
        self.at_steps.append(self.num_received)
        return StepOutcome()

    def settle(self) -> None:
        self.is_settled = True

    def yield_device(self, wait: Wait) -> None:
        raise AssertionError("nothing ran")


class BusyEngine(FakeEngine):
    """An engine whose steps all compute something, and that pauses after each as long as it may.
    `num_pauses` were begun, `num_ended` are over."""

    def __init__(self) -> None:
        super().__init__()
        self.num_pauses = self.num_ended = 0

    def step(self) -> StepOutcome:
        super().step()
        return StepOutcome(retired=(RetiredStep(1, 0.1, has_prompts=False),), is_busy=True)

    def yield_device(self, wait: Wait) -> None:
        self.num_pauses += 1
        wait(20.0 if self.num_pauses == 1 else 0.001)
        self.num_ended += 1


@asynccontextmanager
async def running(engine: FakeEngine) -> AsyncIterator[EngineThread]:
    failed: list[BaseException] = []
    loop = asyncio.get_running_loop()
    any_engine: Any = engine
    thread = EngineThread(any_engine, loop, engine.outcomes.append, failed.append)
    thread.start()
    try:
        yield thread
    finally:
        await asyncio.to_thread(thread.stop)
    assert not failed
    assert engine.is_settled


async def has_received(engine: FakeEngine, num_commands: int) -> None:
    await until(lambda: engine.num_received >= num_commands)


def admitted(*, is_started: bool) -> Admit:
    group: Any = object()
    return Admit(group, is_started)


async def test_unstarted_sequences_come_with_the_next_command() -> None:
    """In order, and the thread is not woken for each of them: each wake costs the event loop an
    iteration."""
    engine = FakeEngine()
    waiting = [admitted(is_started=False) for _ in range(3)]
    async with running(engine) as thread:
        for each in waiting:
            thread.send(each)
        assert thread._inbox.empty()
        assert not engine.received
        thread.send(Start("a"))
        await has_received(engine, 4)
        assert engine.received == [[*waiting, Start("a")]]
        thread.send(waiting[0])
        thread.send(Remove("b"))
        await has_received(engine, 6)
        assert engine.received[1] == [waiting[0], Remove("b")]


async def test_started_sequences_wait_for_no_other() -> None:
    engine = FakeEngine()
    async with running(engine) as thread:
        thread.send(started := admitted(is_started=True))
        await has_received(engine, 1)
        assert engine.received == [[started]]


async def test_a_step_begins_when_its_engine_has_whom_it_waited_for() -> None:
    """Their commands are applied, and reported, at once."""
    engine = FakeEngine(waits_for=3)
    async with running(engine) as thread:
        thread.send(Remove("a"))
        await has_received(engine, 1)
        thread.send(Remove("b"))
        await has_received(engine, 2)
        assert engine.at_steps == []
        thread.send(Remove("c"))
        await has_received(engine, 3)
    assert engine.at_steps == [3]
    assert [one.key for outcome in engine.outcomes for one in outcome.advances] == ["a", "b", "c"]


async def test_a_waiting_thread_can_be_stopped() -> None:
    engine = FakeEngine(waits_for=3)
    async with running(engine) as thread:
        thread.send(Remove("a"))
        await has_received(engine, 1)
    assert engine.at_steps == []


async def test_a_new_sequence_ends_a_pause() -> None:
    """Commands about blocks, an end, or an unstarted sequence do not: running streams can wait for
    those."""
    engine = BusyEngine()
    async with running(engine) as thread:
        thread.send(AddBlocks("a", (0,)))
        await until(lambda: engine.num_pauses > 0)
        thread.send(AddBlocks("a", (1,)))
        thread.send(AbortSequence("a", 0))
        thread.send(admitted(is_started=False))
        await asyncio.sleep(0.05)
        assert engine.num_ended == 0
        thread.send(Start("a"))
        await until(lambda: engine.num_ended > 0)
        await has_received(engine, 5)


async def test_the_thread_does_not_pause_while_a_first_step_is_due() -> None:
    """A sequence that arrives during a step is in the next one, without a pause before it; then the
    pauses go on."""

    class Slow(BusyEngine):
        def step(self) -> StepOutcome:
            if not self.at_steps:
                thread.send(admitted(is_started=True))  # the step is under way
            return super().step()

        def yield_device(self, wait: Wait) -> None:
            assert self.num_received == 2
            self.num_pauses += 1

    engine = Slow()
    async with running(engine) as thread:
        thread.send(AddBlocks("a", (0,)))
        await until(lambda: engine.num_pauses > 0)
    assert len(engine.at_steps) > 1
