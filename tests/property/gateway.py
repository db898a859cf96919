"""A gateway that walks requests through the workers of a pair, and notes all that it hears."""

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from services.common.errors import InvalidRequest
from services.common.ticket import Ticket, TicketSequence
from services.decode.worker import DecodeWorker
from services.worker.events import Event, Failed, Prefilled, Requeued, RequeueReason, Reserved, Step
from tests.property.late import Pipe

if TYPE_CHECKING:
    from tests.property.pair import Pair


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
        case Prefilled(of):
            return not of.sequences
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
            case Prefilled(issued, (output,)):
                self._give_up_ticket(request)  # what was swapped out has come back
                self._deliver(request, output.token_id, output.finish)
                if issued.sequences:
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
