"""A prefill and two decode workers on one pool, two gateways, and everything between them late by
chance, in virtual time: what would take minutes takes milliseconds, a hang shows as hours."""

import asyncio
import itertools
import random
import selectors
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from prometheus_client import CollectorRegistry

from blockstore.memory_store import MemoryStore
from blockstore.recount import audit
from services.common.errors import InvalidRequest
from services.common.metrics import WorkerMetrics
from services.common.ticket import Ticket, TicketSequence
from services.decode.worker import DecodeWorker
from services.engine.engine import Engine
from services.engine.messages import Command, StepOutcome
from services.prefill.worker import PrefillWorker
from services.worker import pool_worker
from services.worker.colder import ColderPool
from services.worker.events import (
    Event,
    Failed,
    Prefilled,
    Requeued,
    RequeueReason,
    Reserved,
    Step,
)
from services.worker.pool_worker import Limits
from tests.unit.workers.fakes import Arena, FakeForward, join, make_pool, make_stamps

HANG_S = 60.0


class VirtualLoop(asyncio.SelectorEventLoop):
    """Its clock jumps to whatever is due next."""

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
    """Things arrive in order, each a little later than it was put."""

    def __init__(self, chance: random.Random) -> None:
        self._loop = asyncio.get_running_loop()
        self._chance = chance
        self._last = 0.0

    def put(self, arrive: Callable[[], object]) -> None:
        due = self._loop.time() + self._chance.choice((0.0, 0.001, 0.02))
        self._last = max(due, self._last + 1e-6)
        self._loop.call_at(self._last, arrive)


class LateStore:
    """The store as one worker sees it: mutations are carried out in the order of the calls, later,
    and answered later still; reads go another way."""

    def __init__(self, store: MemoryStore, chance: random.Random) -> None:
        self._store = store
        self._ways = {True: (Pipe(chance), Pipe(chance)), False: (Pipe(chance), Pipe(chance))}

    async def wait_for_room(self, pool_id: str, timeout_s: float) -> None:
        await self._store.wait_for_room(pool_id, timeout_s)

    def __getattr__(self, name: str) -> Callable[..., asyncio.Future[Any]]:
        there, back = self._ways[name in ("heartbeat", "holders", "stats", "match")]

        def call(*args: Any) -> asyncio.Future[Any]:
            reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            there.put(lambda: self._carry_out(name, args, reply, back))
            return reply

        return call

    def _carry_out(self, name: str, args: Any, reply: asyncio.Future[Any], back: Pipe) -> None:
        answer, error = None, None
        try:
            getattr(self._store, name)(*args).send(None)
        except StopIteration as done:
            answer = done.value
        except Exception as raised:
            error = raised
        for ledger in self._store._ledgers.values():
            assert audit(ledger).violations == ()

        def settle() -> None:
            if reply.done():
                return
            if error:
                reply.set_exception(error)
            else:
                reply.set_result(answer)

        back.put(settle)


class LateEngine:
    """`EngineThread` without the thread: a step takes its time, and the loop hears of it later."""

    chance: random.Random

    @classmethod
    def instead(cls, chance: random.Random) -> AbstractContextManager[object]:
        """Of the thread, in all workers that are made meanwhile."""
        cls.chance = chance
        return mock.patch.object(pool_worker, "EngineThread", cls)

    def __init__(
        self,
        engine: Engine,
        loop: asyncio.AbstractEventLoop,
        on_outcome: Callable[[StepOutcome], None],
        on_failure: Callable[[BaseException], None],
        may_step: Callable[[], bool],
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
            outcome = self._engine.step(commands)
        except BaseException as error:
            self._on_failure(error)
            return
        if outcome.num_tokens or outcome.removed:
            self._outcomes.put(lambda: self._on_outcome(outcome))
        if outcome.num_tokens:
            self._go_on()


class LateColderPool(ColderPool):
    """Copies without a thread: they take their time."""

    chance: random.Random

    async def _in_thread(self, work: Callable[[], float]) -> float:
        await asyncio.sleep(self.chance.choice((0.0, 0.001, 0.02)))
        return work()


@dataclass(eq=False)
class Request:
    """`asked`: its ticket, as it was first. `at_rest`: one that a decode worker handed over, or
    swapped out.
    `over`: its finish reason, an error, or "aborted"."""

    asked: Ticket
    attempt: int = 0
    tokens: list[int] = field(default_factory=list)
    at_rest: Ticket | None = None
    over: str = ""


class Stream:
    """A session and the way back to its gateway."""

    def __init__(self, chance: random.Random, hear: Callable[["Stream", Event], None]) -> None:
        self.there, self._back = Pipe(chance), Pipe(chance)
        self.broken = False
        self._hear = hear
        self._ended: set[tuple[str, int]] = set()

    def send(self, event: Event) -> None:
        for key in _keys(event):
            assert key not in self._ended, f"{event} after the end"
            if _is_last(event, key):
                self._ended.add(key)
        self._back.put(lambda: self.broken or self._hear(self, event))


def _keys(event: Event) -> Iterator[tuple[str, int]]:
    match event:
        case Step(outputs):
            yield from ((output.request_id, output.attempt) for output in outputs)
        case Prefilled(of) | Requeued(of):
            yield of.key
        case Reserved() | Failed():
            yield event.request_id, event.attempt


def _is_last(event: Event, key: tuple[str, int]) -> bool:
    match event:
        case Step(outputs):
            return any(o.finish for o in outputs if (o.request_id, o.attempt) == key)
        case Prefilled(_, finish):
            return finish is not None
        case Requeued(of):
            # at rest, it may still be taken back
            return not of.sequences[0].block_ids and of.swapped is None
        case Reserved():
            return False
    return True


class Gateway:
    """Walks requests through the workers as `services.gateway.journey` does, without a deadline of
    its own: workers must tell. An attempt's number says which decode worker it is for."""

    def __init__(self, pair: "Pair") -> None:
        self._pair = pair
        self.requests: dict[str, Request] = {}
        self._attempts = itertools.count(1)
        self._connect()

    def _connect(self) -> None:
        self._prefill = Stream(self._pair.chance, self._hear)
        self._decode = tuple(Stream(self._pair.chance, self._hear) for _ in self._pair.decode)

    def begin(self, asked: Ticket) -> None:
        request = self.requests[asked.request_id] = Request(asked)
        self._begin_again(request)

    def abort(self, request_id: str) -> None:
        request = self.requests.get(request_id)
        if request and not request.over:
            request.over = "aborted"
            self._let_go(request)

    def hand_over(self, number: int) -> None:
        """Whoever runs one of the requests puts it at rest; it goes on wherever its next attempt
        goes."""
        if there := [request for request in self.requests.values() if not request.over]:
            request = there[number % len(there)]
            key = request.asked.request_id, request.attempt
            worker, stream = self._runs(request.attempt)
            stream.there.put(lambda: worker.hand_over(stream, *key))

    def reconnect(self) -> None:
        """The streams break; workers hear of it when they hear of it."""
        for worker, stream in self._ways():
            stream.broken = True
            stream.there.put(lambda w=worker, s=stream: w.close(s))  # type: ignore[misc]
        self._connect()
        for request in self.requests.values():
            if not request.over:
                self._begin_again(request)

    def _ways(self) -> Iterator[tuple[Any, Stream]]:
        yield self._pair.prefill, self._prefill
        yield from zip(self._pair.decode, self._decode, strict=True)

    def _runs(self, attempt: int) -> tuple[DecodeWorker, Stream]:
        number = attempt % len(self._decode)
        return self._pair.decode[number], self._decode[number]

    def _begin_again(self, request: Request) -> None:
        self._let_go(request)
        self._try_again(request)

    def _try_again(self, request: Request) -> None:
        request.attempt = next(self._attempts)
        self._reserve(request, request.attempt)

    def _reserve(self, request: Request, attempt: int) -> None:
        if (request.attempt, request.over) == (attempt, ""):
            request_id = request.asked.request_id
            worker, stream = self._runs(attempt)
            stream.there.put(lambda: worker.reserve(stream, request_id, attempt, 1))

    def _let_go(self, request: Request) -> None:
        self._abort(request, request.attempt)
        self._give_up_ticket(request)

    def _give_up_ticket(self, request: Request) -> None:
        if request.at_rest:
            self._abort(request, request.at_rest.attempt)
            request.at_rest = None

    def _abort(self, request: Request, attempt: int) -> None:
        request_id = request.asked.request_id
        for worker, stream in self._ways():
            stream.there.put(lambda w=worker, s=stream: w.abort(s, request_id, attempt))  # type: ignore[misc]

    def _hear(self, stream: Stream, event: Event) -> None:
        outputs = event.outputs if isinstance(event, Step) else (event,)
        for one, (request_id, attempt) in zip(outputs, _keys(event), strict=True):
            request = self.requests[request_id]
            if (request.attempt, request.over) == (attempt, ""):
                self._on(request, one)
            elif request.at_rest and request.at_rest.attempt == attempt and not request.over:
                request.at_rest = None  # taken back: the attempt under way finds it stale

    def _on(self, request: Request, event: Any) -> None:
        match event:
            case Reserved(granted=True) if request.at_rest and not request.at_rest.swapped:
                worker, way = self._runs(request.attempt)
                self._tell(worker.admit, way, replace(request.at_rest, attempt=request.attempt))
            case Reserved(granted=True):
                self._submit(request)
            case Reserved() | Requeued() if self._pair.draining:
                request.over = "drained"  # nobody else is there
                self._let_go(request)
            case Reserved():
                loop = asyncio.get_running_loop()
                loop.call_later(0.05, self._reserve, request, request.attempt)
            case Prefilled(issued, finish):
                self._give_up_ticket(request)  # what was swapped out has come back
                self._deliver(request, issued.sequences[0].token_ids[-1], finish)
                if not finish:
                    worker, way = self._runs(request.attempt)
                    self._tell(worker.admit, way, issued)
            case Requeued(at_rest, reason) if reason is RequeueReason.HANDED_OVER or (
                at_rest.swapped is not None
            ):
                assert at_rest.sequences[0].token_ids == tuple(request.tokens)
                request.at_rest = at_rest
                self._try_again(request)
            case Requeued():
                self._begin_again(request)
            case Failed(code=code):
                request.over = code
                self._let_go(request)
            case _:
                request.at_rest = None  # it was claimed
                position = len(request.asked.prompt_token_ids) + len(request.tokens)
                assert event.position == position
                self._deliver(request, event.token_id, event.finish)

    def _submit(self, request: Request) -> None:
        holder_id = f"h{self._pair.next_holder()}"
        resumed = replace(
            request.asked,
            attempt=request.attempt,
            holder_id=holder_id,
            sequences=(TicketSequence(0, tuple(request.tokens)),),
            swapped=request.at_rest.swapped if request.at_rest else None,
        )
        self._tell(self._pair.prefill.submit, self._prefill, resumed)

    def _tell(self, take: Any, stream: Stream, sent: Ticket) -> None:
        def arrive() -> None:
            try:
                take(stream, sent)
            except InvalidRequest as error:
                stream.send(Failed(*sent.key, error.code, str(error)))

        stream.there.put(arrive)

    def _deliver(self, request: Request, token: int, finish: Any) -> None:
        request.tokens.append(token)
        if finish:
            request.over = finish.value
            self._let_go(request)


class Pair:
    """The workers of one pool and their gateways."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.store = MemoryStore()
        self.prefill: PrefillWorker
        self.decode: tuple[DecodeWorker, ...]
        self.arena: Arena
        self.colder: Arena | None = None
        self.draining = False
        self.gateways: tuple[Gateway, ...] = ()
        self._holders = itertools.count(1)
        self._tasks: list[asyncio.Task[None]] = []

    def next_holder(self) -> int:
        return next(self._holders)

    async def open(
        self,
        directory: Path,
        num_blocks: int,
        block_size: int,
        limits: Limits,
        num_swap_blocks: int = 0,
    ) -> None:
        spec = await make_pool(self.store, num_blocks, block_size)
        if num_swap_blocks:
            colder_spec = await make_pool(self.store, num_swap_blocks, block_size, "colder")
            stamps = make_stamps(directory / "colder", colder_spec)
            self.colder = Arena(block_size, stamps)
        stamps = make_stamps(directory / "stamps", spec)
        self.arena = Arena(block_size, stamps)
        model = FakeForward(self.arena)
        workers: list[Any] = []
        classes: tuple[Any, ...] = (PrefillWorker, DecodeWorker, DecodeWorker)
        for number, cls in enumerate(classes):
            membership = await join(self.store, spec, f"{cls.__name__}-{number}", stamps)
            late: Any = LateStore(self.store, self.chance)
            metrics = WorkerMetrics(CollectorRegistry())
            beside: LateColderPool | None = None
            if self.colder:
                there = await join(
                    self.store, colder_spec, membership.worker_id, self.colder.stamps
                )
                copies = (
                    partial(self.colder.copy_from, self.arena),
                    partial(self.arena.copy_from, self.colder),
                )
                beside = LateColderPool(late, membership, there, *copies, metrics, False)
                beside.chance = self.chance
            workers.append(cls(late, membership, model, limits, metrics, beside))
        self.prefill, *decode = workers
        self.decode = tuple(decode)
        self._tasks = [asyncio.create_task(worker.run()) for worker in workers]
        self.gateways = Gateway(self), Gateway(self)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Fails when a worker has, or when it takes too long."""
        async with asyncio.timeout(HANG_S):
            while not holds():
                for task in self._tasks:
                    assert not task.done(), task.exception()
                await asyncio.sleep(0.01)

    async def drain(self) -> None:
        """The workers take nothing new; return when they have nothing left."""
        self.draining = True
        workers = self.prefill, *self.decode
        for worker in workers:
            worker.drain()
        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*(worker.drained() for worker in workers))

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def requests(self) -> list[Request]:
        return [r for gateway in self.gateways for r in gateway.requests.values()]

    @property
    def leftovers(self) -> dict[str, object]:
        """What is left of requests that are over, by where it lies."""
        stats = self.store.ledger("pool").stats()
        prefill = self.prefill
        places: dict[str, object] = {
            "held": stats.num_held,
            "waiters": stats.num_waiters,
            "prefill": prefill._jobs or prefill._computing or prefill._issued,
            "timers": prefill._jobs._timers,
            "line": len(prefill._admission),
            "prefixes": prefill._prefixes._leaders,
        }
        if self.colder:
            places["swapped out"] = self.store.ledger("colder").stats().num_held
            places["fetching"] = prefill._fetching.qsize()
        for number, decode in enumerate(self.decode):
            grower = decode._grower
            places[f"decode {number}"] = decode._jobs or decode._running or decode._resting._on_pool
            places[f"timers {number}"] = decode._jobs._timers
            places[f"grower {number}"] = grower._holders or grower._wanting
            places[f"slots {number}"] = decode.limits.max_num_seqs - decode.load().num_free_slots
        return {place: what for place, what in places.items() if what}
