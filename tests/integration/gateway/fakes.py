"""Workers that speak the real messages over real gRPC, and compute nothing: the next token is a
function of all before it, so that a token lost, repeated or changed shows in every one after it."""

import asyncio
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from grpc import aio

from blockstore.registry import Load, Member, Role
from blockstore.store import FUNCTION_LIBRARY
from quire.v1 import (
    decode_pb2,
    decode_pb2_grpc,
    logprobs_pb2,
    prefill_pb2,
    prefill_pb2_grpc,
    sampling_pb2,
    ticket_pb2,
    worker_pb2,
)
from services.common.errors import Unavailable
from services.common.rpc import RpcServer
from services.common.version import PROTOCOL_VERSION
from services.common.wire import ticket_from_wire
from services.worker.trials import Trials

FIRST_TOKEN, NUM_TOKENS = 97, 26
"""Tokens are the letters a to z of a byte-level vocabulary."""


def next_token(tokens: Sequence[int], index: int = 0) -> int:
    """Of the sequence with that index."""
    salt = f" of {index}" if index else ""
    return FIRST_TOKEN + zlib.crc32(f"{list(tokens)}{salt}".encode()) % NUM_TOKENS


def expected(prompt: Sequence[int], num_tokens: int, index: int = 0) -> list[int]:
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, index))
    return tokens[len(prompt) :]


def logprobs_of(tokens: Sequence[int], num_top: int) -> logprobs_pb2.Logprobs:
    """Of the last of these tokens: a number that all of them decide."""
    return logprobs_pb2.Logprobs(
        logprob=-(zlib.crc32(repr(list(tokens)).encode()) % 1024) / 128,
        rank=1 + tokens[-1] % 7,
        top_token_ids=range(FIRST_TOKEN, FIRST_TOKEN + num_top),
        top_logprobs=[-each / 4 for each in range(num_top)],
    )


def told(tokens: Sequence[int], sampling: ticket_pb2.TicketSampling) -> list[logprobs_pb2.Logprobs]:
    """Of the last one, if that is asked for."""
    return [logprobs_of(tokens, sampling.logprobs)] if sampling.HasField("logprobs") else []


class Session:
    """One gateway's stream."""

    def __init__(self, response: Callable[..., Any]) -> None:
        self._response = response
        self._outgoing: asyncio.Queue[Any] = asyncio.Queue()

    def send(self, **event: Any) -> None:
        self._outgoing.put_nowait(self._response(**event))

    def end(self) -> None:
        self._outgoing.put_nowait(None)

    def die(self) -> None:
        """After what was sent."""
        self._outgoing.put_nowait(Unavailable("the worker has died"))

    async def responses(self) -> AsyncIterator[Any]:
        while (response := await self._outgoing.get()) is not None:
            if isinstance(response, Unavailable):
                raise response
            yield response


@dataclass(eq=False)
class FakeWorker:
    """`seen`: every command, in order. `aborted`: by (request, attempt). `stuck`: its streams are
    whole, and nothing comes over them. `begins`: what it gets; otherwise that is `waiting`.
    `dies_of`: the request that it dies of, `takes_s` after it has begun it."""

    role: ClassVar[Role]
    service: ClassVar[str]

    worker_id: str
    pool_id: str = "pool"
    protocol_version: int = PROTOCOL_VERSION
    max_model_len: int = 4096
    load: Load = field(default_factory=Load)
    seen: list[Any] = field(default_factory=list)
    aborted: list[tuple[str, int]] = field(default_factory=list)
    sessions: list[Session] = field(default_factory=list)
    num_hellos: int = 0
    num_reports: int = 0
    num_deaths: int = 0
    dies_of: str = ""
    takes_s: float = 0.0
    stuck: bool = False
    begins: bool = True
    stalled: bool = False
    waiting: list[tuple[Session, Any]] = field(default_factory=list)
    trials: Trials = field(default_factory=Trials)

    async def serve(self, stream: AsyncIterator[Any], response: Callable[..., Any]) -> Any:
        hello = (await anext(stream)).hello
        assert (hello.protocol_version, hello.function_library) == (
            PROTOCOL_VERSION,
            FUNCTION_LIBRARY,
        )
        while self.stuck:
            await asyncio.sleep(0.01)
        self.num_hellos += 1
        session = Session(response)
        self.sessions.append(session)
        session.send(welcome=self._welcome())
        reading = asyncio.create_task(self._read(stream, session))
        reporting = asyncio.create_task(self._keep_reporting(session))
        try:
            async for message in session.responses():
                yield message
        finally:
            reading.cancel()
            reporting.cancel()
            self.sessions.remove(session)
            self.on_closed(session)

    async def _read(self, stream: AsyncIterator[Any], session: Session) -> None:
        async for request in stream:
            kind = request.WhichOneof("command")
            command = getattr(request, kind)
            self.seen.append(command)
            if kind == "abort" and not command.HasField("index"):
                self.aborted.append((command.request_id, command.attempt))
                self.trials.leave(command.request_id)
            getattr(self, f"on_{kind}")(session, command)

    async def _keep_reporting(self, session: Session) -> None:
        while True:
            if not self.stuck:
                session.send(load=self._load())
                self.num_reports += 1
            await asyncio.sleep(0.02)

    def begin(self, session: Session, command: Any, compute: Callable[[], None]) -> None:
        """What real workers do, too: suspects one at a time."""
        ticket = command.ticket

        def go_on() -> None:
            if session not in self.sessions:
                return
            if ticket.request_id == self.dies_of:
                self.num_deaths += 1
                self.die()
            else:
                compute()

        def begin() -> None:
            self.say_begun(session, command)
            if self.takes_s:
                asyncio.get_running_loop().call_later(self.takes_s, go_on)
            else:
                go_on()

        if not self.begins:
            self.waiting.append((session, command))
        elif command.suspect:
            self.trials.enter(ticket.request_id, begin)
        else:
            begin()

    def say_begun(self, session: Session, command: Any) -> None:
        key = command.ticket.request_id, command.ticket.attempt
        session.send(began=worker_pb2.Began(request_id=key[0], attempt=key[1]))

    def commands(self, kind: type) -> list[Any]:
        return [command for command in self.seen if isinstance(command, kind)]

    def on_closed(self, session: Session) -> None: ...

    def on_abort(self, session: Session, abort: worker_pb2.Abort) -> None: ...

    def close_streams(self) -> None:
        for session in self.sessions:
            session.end()

    def die(self) -> None:
        """As its gateways see it: all streams break. It is another one after that."""
        self.trials = Trials()
        for session in self.sessions:
            session.die()

    def report(self, load: Load, draining: bool = False) -> None:
        self.load = load
        for session in self.sessions:
            session.send(load=self._load(draining))

    def _load(self, draining: bool = False) -> worker_pb2.WorkerLoad:
        return worker_pb2.WorkerLoad(
            num_running=self.load.num_running,
            num_free_slots=self.load.num_free_slots,
            num_pending_tokens=self.load.num_pending_tokens,
            draining=draining,
            stalled=self.stalled,
        )

    def _welcome(self) -> worker_pb2.Welcome:
        return worker_pb2.Welcome(
            worker_id=self.worker_id,
            protocol_version=self.protocol_version,
            function_library=FUNCTION_LIBRARY,
            pool_id=self.pool_id,
            load=self._load(),
        )


class FakePrefill(FakeWorker, prefill_pb2_grpc.PrefillServicer):
    """Answers at once, or keeps tickets in `held` while `holds`. `num_cached` is what it says to
    have found of every prompt."""

    role: ClassVar[Role] = "prefill"
    service = prefill_pb2.DESCRIPTOR.services_by_name["Prefill"].full_name

    def __init__(self, worker_id: str = "prefill-1", **fields: Any) -> None:
        super().__init__(worker_id, **fields)
        self.holds = False
        self.held: list[tuple[Session, ticket_pb2.Ticket]] = []
        self.prompt_logprobs: dict[str, int] = {}
        self.num_cached = 0
        self.spoil: Callable[[ticket_pb2.Ticket], None] = lambda ticket: None

    @property
    def submitted(self) -> list[ticket_pb2.Ticket]:
        return [submit.ticket for submit in self.commands(prefill_pb2.PrefillSubmit)]

    def register(self, server: aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServicer_to_server(self, server)

    async def Connect(self, request_iterator: Any, context: Any) -> Any:
        async for response in self.serve(request_iterator, prefill_pb2.PrefillConnectResponse):
            yield response

    def on_submit(self, session: Session, submit: prefill_pb2.PrefillSubmit) -> None:
        self.prompt_logprobs.pop(submit.ticket.request_id, None)
        if submit.HasField("prompt_logprobs"):
            self.prompt_logprobs[submit.ticket.request_id] = submit.prompt_logprobs
        self.begin(session, submit, lambda: self._compute(session, submit.ticket))

    def _compute(self, session: Session, ticket: ticket_pb2.Ticket) -> None:
        if self.holds:
            self.held.append((session, ticket))
        else:
            self.answer(session, ticket)

    def let_go(self) -> None:
        self.holds = False
        while self.held:
            self.answer(*self.held.pop(0))

    def answer(self, session: Session, submitted: ticket_pb2.Ticket) -> None:
        ticket = ticket_pb2.Ticket()
        ticket.CopyFrom(submitted)
        if not any(sequence.token_ids for sequence in submitted.sequences):
            ticket.num_cached_tokens = self.num_cached
        ticket.holder_epoch = 2
        del ticket.sequences[:]
        outputs = [self._first_token(ticket, sequence) for sequence in submitted.sequences]
        self.spoil(ticket)
        prompt, of_prompt = ticket.prompt_token_ids, []
        num_top = self.prompt_logprobs.get(ticket.request_id)
        if num_top is not None:
            of_prompt = [logprobs_of(prompt[:n], num_top) for n in range(2, len(prompt) + 1)]
        prefilled = prefill_pb2.Prefilled(ticket=ticket, outputs=outputs, prompt_logprobs=of_prompt)
        session.send(prefilled=prefilled)
        self.trials.leave(ticket.request_id)

    def _first_token(
        self, ticket: ticket_pb2.Ticket, submitted: ticket_pb2.TicketSequence
    ) -> worker_pb2.SequenceOutput:
        """With it the sequence is in the ticket, unless it ends."""
        tokens = [*ticket.prompt_token_ids, *submitted.token_ids]
        token = next_token(tokens, submitted.index)
        output = worker_pb2.SequenceOutput(
            request_id=ticket.request_id,
            attempt=ticket.attempt,
            index=submitted.index,
            position=len(tokens),
            token_ids=[token],
            logprobs=told([*tokens, token], ticket.sampling),
        )
        if len(submitted.token_ids) + 1 == ticket.sampling.max_tokens:
            output.finish_reason = sampling_pb2.FINISH_REASON_LENGTH
        else:
            ticket.sequences.add(
                index=submitted.index,
                token_ids=[*submitted.token_ids, *output.token_ids],
                block_ids=range(len(tokens) // 16 + 1),
                num_computed_tokens=len(tokens),
            )
        return output


@dataclass(eq=False)
class Running:
    """`tokens`: by index, of those that have not ended."""

    session: Session
    ticket: ticket_pb2.Ticket
    tokens: dict[int, list[int]]

    @classmethod
    def of(cls, session: Session, ticket: ticket_pb2.Ticket) -> "Running":
        return cls(session, ticket, {s.index: list(s.token_ids) for s in ticket.sequences})

    @property
    def num_generated(self) -> int:
        """Of the sequence that has fewest."""
        return min(map(len, self.tokens.values()))

    @property
    def key(self) -> tuple[str, int]:
        return self.ticket.request_id, self.ticket.attempt

    def at_rest(self) -> ticket_pb2.Ticket:
        """Its ticket, with the tokens that it has now."""
        ticket = ticket_pb2.Ticket()
        ticket.CopyFrom(self.ticket)
        ticket.holder_epoch += 2
        del ticket.sequences[:]
        for index, tokens in self.tokens.items():
            ticket.sequences.add(
                index=index,
                token_ids=tokens,
                block_ids=[0],
                num_computed_tokens=len(ticket.prompt_token_ids) + len(tokens) - 1,
            )
        return ticket


class FakeDecode(FakeWorker, decode_pb2_grpc.DecodeServicer):
    """Steps all its sequences as fast as the loop turns, except while `paused`. `parks`: what a
    gateway leaves that is gone stays, for another one."""

    role: ClassVar[Role] = "decode"
    service = decode_pb2.DESCRIPTOR.services_by_name["Decode"].full_name

    def __init__(self, worker_id: str = "decode-1", num_slots: int = 64, **fields: Any) -> None:
        super().__init__(worker_id, load=Load(num_free_slots=num_slots), **fields)
        self.num_slots = num_slots
        self.slots: dict[tuple[str, int], int] = {}
        self.ended_early: list[tuple[str, int, int]] = []
        self.running: dict[str, Running] = {}
        self.answers_reservations = True
        self.unanswered: list[tuple[Session, decode_pb2.Reserve]] = []
        self.parks = False
        self.at_rest: dict[str, tuple[Session, ticket_pb2.Ticket]] = {}
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
            self.slots[reserve.request_id, reserve.attempt] = reserve.num_sequences
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
        assert len(ticket.sequences) <= self.slots[key]
        self.slots[key] = len(ticket.sequences)
        self.begin(session, admit, lambda: self._run(session, ticket))

    def _run(self, session: Session, ticket: ticket_pb2.Ticket) -> None:
        self.running[ticket.request_id] = Running.of(session, ticket)
        self.go_on()

    def on_abort(self, session: Session, abort: worker_pb2.Abort) -> None:
        key = abort.request_id, abort.attempt
        running = self.running.get(abort.request_id)
        if abort.HasField("index"):
            self.ended_early.append((*key, abort.index))
            if running is not None and running.key == key:
                self._end(running, abort.index)
            return
        self.slots.pop(key, None)
        if running is not None and running.key == key:
            del self.running[abort.request_id]

    def _end(self, running: Running, index: int) -> None:
        """One sequence of those that run; the request with the last."""
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
        """Release a ticket at rest, and say so."""
        session, at_rest = self.at_rest.pop(request_id)
        ticket = ticket_pb2.Ticket(request_id=request_id, attempt=at_rest.attempt)
        reason = worker_pb2.Requeue.REASON_PREEMPTED
        session.send(requeue=worker_pb2.Requeue(ticket=ticket, reason=reason))

    def on_closed(self, session: Session) -> None:
        if self.parks:
            self.parked |= {k: r for k, r in self.running.items() if r.session is session}
        self.running = {k: r for k, r in self.running.items() if r.session is not session}
        self.slots.clear()

    def on_resume(self, session: Session, resume: decode_pb2.Resume) -> None:
        """Give a sequence to the gateway that asks for it."""
        wanted = resume.ticket
        ticket_from_wire(wanted)  # InvalidRequest would break the stream
        ticket = ticket_pb2.Ticket(request_id=wanted.request_id, attempt=wanted.attempt)
        running = self.parked.pop(wanted.request_id, None)
        if running is not None:
            ticket = running.at_rest()
            ticket.attempt = wanted.attempt
        session.send(
            requeue=worker_pb2.Requeue(ticket=ticket, reason=worker_pb2.Requeue.REASON_HANDED_OVER)
        )

    def requeue(self, request_id: str, reason: Any) -> None:
        """Give a running request back."""
        running = self.running.pop(request_id)
        self.slots.pop(running.key, None)
        ticket = ticket_pb2.Ticket(request_id=request_id, attempt=running.ticket.attempt)
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
        self.trials.leave(running.ticket.request_id)
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


async def start(worker: FakePrefill | FakeDecode) -> tuple[RpcServer, str]:
    """The worker's server and its address."""
    server = RpcServer(worker.service)
    worker.register(server.aio)
    port = await server.start("127.0.0.1", 0)
    return server, f"127.0.0.1:{port}"


def member(worker: FakePrefill | FakeDecode, address: str, model_dir: str) -> Member:
    return Member(
        member_id=worker.worker_id,
        role=worker.role,
        address=address,
        state="serving",
        started_unix_ms=1,
        protocol_version=PROTOCOL_VERSION,
        pool_id=worker.pool_id,
        model="toy",
        model_dir=model_dir,
        max_model_len=worker.max_model_len,
        max_num_seqs=getattr(worker, "num_slots", 64),
        load=worker.load,
        engine={"dtype": "float32"},
    )
