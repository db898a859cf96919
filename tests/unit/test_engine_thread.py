"""The engine's thread: what it gets with which step, and when what came of it is told."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from services.engine.messages import Admit, Command, Remove, Removed, Start, StepOutcome
from services.engine.thread import EngineThread


class FakeEngine:
    """`heard`: the commands of each time. There is never anything to compute."""

    def __init__(self) -> None:
        self.heard: list[list[Command]] = []
        self.told: list[StepOutcome] = []

    def obey(self, commands: Sequence[Command]) -> tuple[Removed, ...]:
        self.heard.append(list(commands))
        return tuple(Removed(c.key, (), None) for c in commands if isinstance(c, Remove))

    def step(self) -> StepOutcome:
        return StepOutcome()

    def give_way(self) -> None:
        raise AssertionError("nothing ran")


@asynccontextmanager
async def running(engine: FakeEngine) -> AsyncIterator[EngineThread]:
    failed: list[BaseException] = []
    loop = asyncio.get_running_loop()
    any_engine: Any = engine
    thread = EngineThread(any_engine, loop, engine.told.append, failed.append, lambda: True)
    thread.start()
    try:
        yield thread
    finally:
        await asyncio.to_thread(thread.stop)
    assert not failed


async def until(engine: FakeEngine, num_commands: int) -> None:
    async with asyncio.timeout(10):
        while sum(map(len, engine.heard)) < num_commands:
            await asyncio.sleep(0.001)


def admitted(*, is_started: bool) -> Admit:
    group: Any = object()
    return Admit(group, (), is_started)


async def test_who_is_not_started_comes_with_the_next_command() -> None:
    """In order, and the thread is not woken for each of many: a wake is a turn that its loop does
    not have."""
    engine = FakeEngine()
    waiting = [admitted(is_started=False) for _ in range(3)]
    async with running(engine) as thread:
        for each in waiting:
            thread.send(each)
        assert thread._inbox.empty()
        assert not engine.heard
        thread.send(Start("a"))
        await until(engine, 4)
        assert engine.heard == [[*waiting, Start("a")]]
        thread.send(waiting[0])
        thread.send(Remove("b"))
        await until(engine, 6)
        assert engine.heard[1] == [waiting[0], Remove("b")]


async def test_who_is_started_already_waits_for_nobody() -> None:
    engine = FakeEngine()
    async with running(engine) as thread:
        thread.send(started := admitted(is_started=True))
        await until(engine, 1)
        assert engine.heard == [[started]]
