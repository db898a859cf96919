"""Random delays of everything, in virtual time: minutes of waiting take milliseconds."""

import asyncio
import random
import selectors
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any
from unittest import mock

from blockstore.memory.recount import audit
from blockstore.memory_store import MemoryStore
from services.engine.engine import Engine
from services.engine.messages import Command, StepOutcome
from services.worker import pool_engine
from services.worker.swap.pool import SwapPool


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next event."""

    def __init__(self) -> None:
        self.now = 0.0
        self.faults: list[object] = []
        super().__init__(_Jump(self))
        self.set_exception_handler(lambda _, context: self.faults.append(context))

    def time(self) -> float:
        return self.now


class _Jump(selectors.SelectSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:  # for a thread's answer
            return super().select(5)
        self._loop.now += timeout
        return super().select(0)


class Pipe:
    """A queue whose items arrive in order, each with a delay."""

    def __init__(self, chance: random.Random) -> None:
        self._loop = asyncio.get_running_loop()
        self._chance = chance
        self._last = 0.0

    def put(self, arrive: Callable[[], object]) -> None:
        due = self._loop.time() + self._chance.choice((0.0, 0.001, 0.02))
        self._last = max(due, self._last + 1e-6)
        self._loop.call_at(self._last, arrive)


class LateStore:
    """The store as one worker reaches it: mutations are carried out later, in the order of the
    calls, and answered still later; reads use another connection."""

    def __init__(
        self, store: MemoryStore, chance: random.Random, check: Callable[[], None]
    ) -> None:
        """`check` is called after each mutation."""
        self._store = store
        self._check = check
        self._ways = {True: (Pipe(chance), Pipe(chance)), False: (Pipe(chance), Pipe(chance))}

    async def wait_for_room(self, pool_id: str, timeout_s: float) -> None:
        await self._store.wait_for_room(pool_id, timeout_s)

    def __getattr__(self, name: str) -> Callable[..., asyncio.Future[Any]]:
        there, back = self._ways[name in ("heartbeat", "holders", "stats", "match")]

        def call(*args: Any, **named: Any) -> asyncio.Future[Any]:
            reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            wanted = partial(getattr(self._store, name), *args, **named)
            there.put(lambda: self._carry_out(wanted, reply, back))
            return reply

        return call

    def _carry_out(self, wanted: Callable[[], Any], reply: asyncio.Future[Any], back: Pipe) -> None:
        answer, error = None, None
        try:
            wanted().send(None)
        except StopIteration as done:
            answer = done.value
        except Exception as raised:
            error = raised
        for ledger in self._store._ledgers.values():
            assert audit(ledger).violations == ()
        self._check()

        def settle() -> None:
            if reply.done():
                return
            if error:
                reply.set_exception(error)
            else:
                reply.set_result(answer)

        back.put(settle)


class LateEngine:
    """`EngineThread` without a thread: a step takes time, and the event loop gets its outcome
    later."""

    chance: random.Random

    @classmethod
    def instead(cls, chance: random.Random) -> AbstractContextManager[object]:
        """Replaces the engine thread of all workers that are made within the block."""
        cls.chance = chance
        return mock.patch.object(pool_engine, "EngineThread", cls)

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        on_outcome: Callable[[StepOutcome], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._engine, self._loop = engine, loop
        self._on_outcome, self._on_failure = on_outcome, on_failure
        self._inbox: deque[Command] = deque()
        self._stepping = False
        self._outcomes = Pipe(self.chance)

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def send(self, command: Command) -> None:
        self._inbox.append(command)
        self._go_on()

    def _go_on(self) -> None:
        if not self._stepping:
            self._stepping = True
            self._loop.call_later(self.chance.choice((0.0, 0.005)), self._step)

    def _step(self) -> None:
        self._stepping = False
        commands = tuple(self._inbox)
        self._inbox.clear()
        try:
            self._send_outcome(StepOutcome(self._engine.apply(commands)))
            outcome = self._engine.step()
        except BaseException as error:
            self._on_failure(error)
            return
        self._send_outcome(outcome)
        if outcome.is_busy:
            self._go_on()

    def _send_outcome(self, outcome: StepOutcome) -> None:
        if outcome.has_results:
            self._outcomes.put(lambda: self._on_outcome(outcome))


class LateColderPool(SwapPool):
    """A swap pool whose copies take time, without a thread."""

    chance: random.Random

    async def _in_thread(self, work: Callable[[], float]) -> float:
        await asyncio.sleep(self.chance.choice((0.0, 0.001, 0.02)))
        return work()
