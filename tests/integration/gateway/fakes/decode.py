"""A decode worker that computes nothing."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from grpc import aio

from blockstore.registry import Load, Role
from quire.v1 import decode_pb2, decode_pb2_grpc, sampling_pb2, ticket_pb2, worker_pb2
from services.protocol.codec import ticket_from_wire
from services.runtime.errors import InvalidRequest

from .model import next_token, state_of, told
from .worker import FakeWorker, Session


@dataclass(eq=False)
class Running:
    """A running request. `tokens`: by index, of the sequences that have not ended."""

    session: Session
    ticket: ticket_pb2.Ticket
    tokens: dict[int, list[int]]

    @classmethod
    def of(cls, session: Session, ticket: ticket_pb2.Ticket) -> "Running":
        return cls(session, ticket, {s.index: list(s.token_ids) for s in ticket.sequences})

    @property
    def num_generated(self) -> int:
        """The number of tokens of the shortest sequence."""
        return min(map(len, self.tokens.values()))

    @property
    def key(self) -> tuple[str, int]:
        return self.ticket.request_id, self.ticket.attempt

    def at_rest(self) -> ticket_pb2.TicketState:
        """Its ticket's state, with the present tokens."""
        ticket = state_of(self.ticket)
        ticket.holder_epoch += 2
        del ticket.sequences[:]
        for index, tokens in self.tokens.items():
            ticket.sequences.add(
                index=index,
                token_ids=tokens,
                block_ids=[0],
                num_computed_tokens=len(self.ticket.prompt_token_ids) + len(tokens) - 1,
            )
        return ticket


class FakeDecode(FakeWorker, decode_pb2_grpc.DecodeServicer):
    """Advances all its sequences at every iteration of the loop, except while `paused`. `parks`:
    keep the requests of a lost gateway for another one."""

    role: ClassVar[Role] = "decode"
    service = decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name

    def __init__(self, worker_id: str = "decode-1", num_slots: int = 64, **fields: Any) -> None:
        super().__init__(worker_id, load=Load(num_free_slots=num_slots), **fields)
        self.num_slots = num_slots
        self.slots: dict[tuple[str, int], int] = {}
        self._reserved_by: dict[tuple[str, int], Session] = {}
        self.running: dict[str, Running] = {}
        self.answers_reservations = True
        self.unanswered: list[tuple[Session, decode_pb2.Reserve]] = []
        self.parks = False
        self.at_rest: dict[str, tuple[Session, ticket_pb2.TicketState]] = {}
        self.parked: dict[str, Running] = {}
        self.pause_after: int | None = None
        self._stepping: asyncio.Task[None] | None = None

    def register(self, server: aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServicer_to_server(self, server)

    async def Connect(self, request_iterator: Any, context: Any) -> Any:
        async for response in self.serve(request_iterator, decode_pb2.DecodeConnectResponse):
            yield response

    def on_reserve(self, session: Session, reserve: decode_pb2.Reserve) -> None:
        if not self.answers_reservations:
            self.unanswered.append((session, reserve))
            return
        granted = sum(self.slots.values()) + reserve.num_sequences <= self.num_slots
        if granted:
            key = reserve.request_id, reserve.attempt
            self.slots[key], self._reserved_by[key] = reserve.num_sequences, session
        session.send(
            reserved=decode_pb2.Reserved(
                request_id=reserve.request_id, attempt=reserve.attempt, granted=granted
            )
        )

    def answer_at_last(self) -> None:
        self.answers_reservations = True
        while self.unanswered:
            self.on_reserve(*self.unanswered.pop(0))

    def on_admit(self, session: Session, admit: decode_pb2.Admit) -> None:
        ticket = admit.ticket
        key = ticket.request_id, ticket.attempt
        self.check_slots(key, len(ticket.sequences))
        self.slots[key] = len(ticket.sequences)
        self.begin(session, admit, lambda: self._run(session, ticket))

    def check_slots(self, key: tuple[str, int], number: int) -> None:
        """InvalidRequest, as from a real worker, if fewer slots are reserved for this attempt."""
        if number > self.slots.get(key, 0):
            raise InvalidRequest(f"{self.slots.get(key, 0)} slots are reserved for {number}")

    def _run(self, session: Session, ticket: ticket_pb2.Ticket) -> None:
        self.running[ticket.request_id] = Running.of(session, ticket)
        self.go_on()

    def on_abort(self, session: Session, abort: worker_pb2.Abort) -> None:
        key = abort.request_id, abort.attempt
        running = self.running.get(abort.request_id)
        if abort.HasField("index"):
            if running is not None and running.key == key:
                self._end(running, abort.index)
            return
        self.slots.pop(key, None)
        if running is not None and running.key == key:
            del self.running[abort.request_id]

    def _end(self, running: Running, index: int) -> None:
        """End one running sequence, and the request with the last one."""
        if running.tokens.pop(index, None) is None:
            return
        if running.key in self.slots:
            self.slots[running.key] -= 1
        if not running.tokens:
            self.slots.pop(running.key, None)
            self.running.pop(running.ticket.request_id, None)

    def on_hand_over(self, session: Session, command: decode_pb2.HandOver) -> None:
        running = self.running.pop(command.request_id, None)
        if running is None:
            return  # it has ended meanwhile
        self.slots.pop((command.request_id, command.attempt), None)
        ticket = running.at_rest()
        reason = worker_pb2.Requeue.REASON_HANDED_OVER
        self.at_rest[command.request_id] = session, ticket
        session.send(requeue=worker_pb2.Requeue(ticket=ticket, reason=reason))

    def take_back(self, request_id: str) -> None:
        """Release a ticket at rest, and report it."""
        session, at_rest = self.at_rest.pop(request_id)
        ticket = ticket_pb2.TicketState(request_id=request_id, attempt=at_rest.attempt)
        reason = worker_pb2.Requeue.REASON_PREEMPTED
        session.send(requeue=worker_pb2.Requeue(ticket=ticket, reason=reason))

    def on_closed(self, session: Session) -> None:
        if self.parks:
            self.parked |= {k: r for k, r in self.running.items() if r.session is session}
        self.running = {k: r for k, r in self.running.items() if r.session is not session}
        self.slots = {k: n for k, n in self.slots.items() if self._reserved_by[k] is not session}

    def on_resume(self, session: Session, resume: decode_pb2.Resume) -> None:
        """Give a sequence to the gateway that asks for it, also if the gateway that had it is just
        about to be lost."""
        ticket = ticket_pb2.TicketState(request_id=resume.request_id, attempt=resume.attempt)
        held = self.running if self.parks and resume.request_id in self.running else self.parked
        running = held.get(resume.request_id)
        if running is not None and ticket_from_wire(running.ticket).digest == resume.digest:
            del held[resume.request_id]
            self.slots.pop(running.key, None)
            ticket = running.at_rest()
            ticket.attempt = resume.attempt
        session.send(
            requeue=worker_pb2.Requeue(ticket=ticket, reason=worker_pb2.Requeue.REASON_HANDED_OVER)
        )

    def requeue(self, request_id: str, reason: Any) -> None:
        """Return a running request to its gateway."""
        running = self.running.pop(request_id)
        self.slots.pop(running.key, None)
        ticket = ticket_pb2.TicketState(request_id=request_id, attempt=running.ticket.attempt)
        running.session.send(requeue=worker_pb2.Requeue(ticket=ticket, reason=reason))

    def go_on(self, pause_after: int | None = None) -> None:
        """Step until nothing runs, or every sequence has `pause_after` tokens."""
        if pause_after is not None:
            self.pause_after = pause_after
        if self._stepping is None or self._stepping.done():
            self._stepping = asyncio.create_task(self._steps())

    async def _steps(self) -> None:
        while runnable := list(self._runnable()):
            outputs: dict[Session, list[worker_pb2.SequenceOutput]] = {}
            for running, index in runnable:
                outputs.setdefault(running.session, []).append(self._step(running, index))
            for session, mine in outputs.items():
                session.send(step=decode_pb2.StepOutput(outputs=mine))
            await asyncio.sleep(0)

    def _runnable(self) -> Iterator[tuple[Running, int]]:
        for running in self.running.values():
            for index, tokens in running.tokens.items():
                if self.pause_after is None or len(tokens) < self.pause_after:
                    yield running, index

    def _step(self, running: Running, index: int) -> worker_pb2.SequenceOutput:
        ticket, tokens = running.ticket, running.tokens[index]
        so_far = [*ticket.prompt_token_ids, *tokens]
        tokens.append(next_token(so_far, index))
        finish = sampling_pb2.FINISH_REASON_UNSPECIFIED
        if len(tokens) == ticket.sampling.max_tokens:
            finish = sampling_pb2.FINISH_REASON_LENGTH
            self._end(running, index)
        return worker_pb2.SequenceOutput(
            request_id=ticket.request_id,
            attempt=ticket.attempt,
            index=index,
            position=len(so_far),
            token_ids=tokens[-1:],
            logprobs=told([*so_far, *tokens[-1:]], ticket.sampling),
            finish_reason=finish,
        )
