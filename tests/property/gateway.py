"""A gateway that takes requests through the workers of a pair, and records all messages."""

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from services.protocol.messages import (
    AwaitsBlocks,
    Began,
    Failed,
    Generated,
    Prefilled,
    Requeued,
    Reserved,
    Step,
    WorkerEvent,
)
from services.protocol.ticket import Ticket, TicketSequence, TicketState
from services.runtime.errors import InvalidRequest
from services.worker.pool_worker import PoolWorker
from services.worker.roles.decode import Decode
from tests.property.late import Pipe

if TYPE_CHECKING:
    from tests.property.pair import Pair


@dataclass(eq=False)
class Request:
    """A request. `asked`: its first ticket. `tokens`: of each sequence, by index. `ended`: how
    finished sequences ended. `detached`: a ticket that a decode worker handed over or swapped out.
    `search`: the state of a beam search in the last ticket. `over`: "done", an error, or
    "aborted"."""

    asked: Ticket
    attempt: int = 0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    ended: dict[int, str] = field(default_factory=dict)
    detached: TicketState | None = None
    search: TicketState | None = None
    over: str = ""

    def __post_init__(self) -> None:
        beam = self.asked.sampling.beam
        samples = [state.index for state in self.asked.sequences]
        wanted = samples if beam is None else range(self.asked.sampling.n)
        self.tokens = {index: [] for index in wanted}

    @property
    def searches(self) -> bool:
        return self.asked.sampling.beam is not None

    @property
    def width(self) -> int:
        return self.asked.width if self.searches else len(self.living)

    def note(self, ticket: TicketState) -> None:
        if self.searches and ticket.beams is not None:
            self.search = ticket

    def to_submit(self) -> Ticket:
        """The ticket to submit, from the received tokens, or the state of the search."""
        if self.searches:
            stands = self.search or self.asked
            states = (TicketSequence(s.index, s.token_ids) for s in stands.sequences)
            return replace(self.asked, sequences=tuple(states), beams=stands.beams)
        states = (TicketSequence(i, tuple(self.tokens[i])) for i in self.living)
        return replace(self.asked, sequences=tuple(states))

    @property
    def living(self) -> list[int]:
        return [index for index in self.tokens if index not in self.ended]

    def of_living(self, state: TicketState) -> Ticket:
        """The ticket without the sequences that have ended since."""
        ticket = self.asked.with_state(state)
        if self.searches:
            return ticket
        living = (one for one in ticket.sequences if one.index not in self.ended)
        return replace(ticket, sequences=tuple(living))


class Stream:
    """A session, and the stream back to its gateway."""

    def __init__(
        self, chance: random.Random, hear: Callable[["Stream", WorkerEvent], None]
    ) -> None:
        self.there, self._back, self._out = Pipe(chance), Pipe(chance), Pipe(chance)
        self.broken = False
        self._hear = hear
        self._ended: set[tuple[str, int] | tuple[str, int, int]] = set()

    def send(self, event: WorkerEvent, then: Callable[[], None] | None = None) -> None:
        for key in _keys(event):
            assert key not in self._ended, f"{event} after the end"
            if _is_last(event):
                self._ended.add(key)
        for output in event.outputs if isinstance(event, Step) else ():
            of_one = output.request_id, output.attempt, output.index
            assert of_one not in self._ended, f"{output} after its end"
            if output.finish_reason:
                self._ended.add(of_one)
        if then is not None:
            self._out.put(then)
        self._back.put(lambda: self.broken or self._hear(self, event))

    def finish(self) -> None: ...


def _keys(event: WorkerEvent) -> Iterator[tuple[str, int]]:
    match event:
        case Step(outputs):
            yield from ((output.request_id, output.attempt) for output in outputs)
        case Prefilled() | Requeued() | Reserved() | Failed() | Began() | AwaitsBlocks():
            yield event.request_id, event.attempt


def _is_last(event: WorkerEvent) -> bool:
    match event:
        case Step():
            return False
        case Prefilled(of):
            return not of.sequences
        case Requeued(ticket=detached):
            return (
                detached is None or not detached.is_detached
            )  # a detached ticket may still be taken back
        case Reserved() | Began() | AwaitsBlocks():
            return False
    return True


class Gateway:
    """Takes requests through the workers as `services.gateway.request.request` does, without
    deadlines of its own: it relies on the workers' messages. An attempt's number determines its
    decode worker."""

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

    def abort_one(self, request_id: str, number: int) -> None:
        """Abort one sequence, as after a stop string."""
        request = self.requests.get(request_id)
        if request is None or request.over or request.searches:
            return
        index = request.living[number % len(request.living)]
        request.ended[index] = "aborted"
        if not request.living:
            self._done(request)
        key = request_id, request.attempt, index
        for worker, stream in self._ways():
            stream.there.put(lambda w=worker, s=stream: w.role.abort(s, *key))  # type: ignore[misc]

    def hand_over(self, number: int) -> None:
        """The worker that runs one of the requests hands it over; it continues at the next
        attempt's worker."""
        if there := [request for request in self.requests.values() if not request.over]:
            request = there[number % len(there)]
            key = request.asked.request_id, request.attempt
            worker, stream = self._runs(request.attempt)
            stream.there.put(lambda: worker.role.hand_over(stream, *key))

    def reconnect(self) -> None:
        """The streams break; the workers learn of it later."""
        for worker, stream in self._ways():
            stream.broken = True
            stream.there.put(lambda w=worker, s=stream: w.role.close(s))  # type: ignore[misc]
        self._connect()
        for request in self.requests.values():
            if not request.over:
                self._begin_again(request)

    def _ways(self) -> Iterator[tuple[Any, Stream]]:
        yield self._pair.prefill, self._prefill
        yield from zip(self._pair.decode, self._decode, strict=True)

    def _runs(self, attempt: int) -> tuple[PoolWorker[Decode], Stream]:
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
            width = request.width
            stream.there.put(lambda: worker.role.reserve(stream, request_id, attempt, width))

    def _let_go(self, request: Request) -> None:
        self._abort(request, request.attempt)
        self._give_up_ticket(request)

    def _give_up_ticket(self, request: Request) -> None:
        if request.detached:
            self._abort(request, request.detached.attempt)
            request.detached = None

    def _abort(self, request: Request, attempt: int) -> None:
        request_id = request.asked.request_id
        for worker, stream in self._ways():
            stream.there.put(lambda w=worker, s=stream: w.role.abort(s, request_id, attempt))  # type: ignore[misc]

    def _hear(self, stream: Stream, event: WorkerEvent) -> None:
        outputs = event.outputs if isinstance(event, Step) else (event,)
        for one, (request_id, attempt) in zip(outputs, _keys(event), strict=True):
            request = self.requests[request_id]
            if (request.attempt, request.over) == (attempt, ""):
                self._on(request, one)
            elif request.detached and request.detached.attempt == attempt and not request.over:
                request.detached = None  # taken back: the attempt under way finds it stale

    def _on(self, request: Request, event: Any) -> None:
        match event:
            case Began() | AwaitsBlocks():
                pass
            case Reserved(granted=True) if request.detached and not request.detached.swapped:
                worker, way = self._runs(request.attempt)
                detached = request.of_living(request.detached)
                self._tell(worker.role.admit, way, replace(detached, attempt=request.attempt))
            case Reserved(granted=True):
                self._submit(request)
            case Reserved() | Requeued() if self._pair.draining:
                request.over = "drained"  # nobody else is there
                self._let_go(request)
            case Reserved():
                loop = asyncio.get_running_loop()
                loop.call_later(0.05, self._reserve, request, request.attempt)
            case Prefilled(issued, outputs):
                self._give_up_ticket(request)  # what was swapped out has come back
                request.note(issued)
                for output in outputs:
                    self._deliver(request, output)
                if not request.over:
                    worker, way = self._runs(request.attempt)
                    self._tell(worker.role.admit, way, request.of_living(issued))
            case Requeued(ticket=TicketState() as detached) if detached.is_detached:
                there = {s.index: list(s.token_ids) for s in request.of_living(detached).sequences}
                if not request.searches:
                    assert there == {index: request.tokens[index] for index in request.living}
                request.note(detached)
                request.detached = detached
                self._try_again(request)
            case Requeued(ticket=TicketState() as progress):
                request.note(progress)
                self._begin_again(request)
            case Failed(code=code):
                request.over = code
                self._let_go(request)
            case _:
                request.detached = None  # it was claimed
                self._deliver(request, event)

    def _submit(self, request: Request) -> None:
        holder_id = f"h{self._pair.next_holder()}"
        resumed = replace(
            request.to_submit(),
            attempt=request.attempt,
            holder_id=holder_id,
            swapped=request.detached.swapped if request.detached else None,
        )
        self._tell(self._pair.prefill.role.submit, self._prefill, resumed)

    def _tell(self, take: Any, stream: Stream, sent: Ticket) -> None:
        def arrive() -> None:
            try:
                take(stream, sent)
            except InvalidRequest as error:
                stream.send(Failed(*sent.key, error.code, str(error)))

        stream.there.put(arrive)

    def _deliver(self, request: Request, output: Generated) -> None:
        if output.index in request.ended:
            return
        tokens = request.tokens[output.index]
        assert output.position == len(request.asked.prompt_token_ids) + len(tokens)
        tokens += output.token_ids
        if output.finish_reason:
            request.ended[output.index] = output.finish_reason.value
        if not request.living:
            self._done(request)

    def _done(self, request: Request) -> None:
        request.over = "done"
        self._let_go(request)
