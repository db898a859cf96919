"""A request's request, with workers that a test plays."""

import asyncio
import itertools
import zlib
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace

from blockstore.registry import Load, Member, Role
from quire.types import Beam
from services.gateway.api import GenerationRequest, RequestedSampling
from services.gateway.output.delta import Delta, Received
from services.gateway.output.output import Output, RequestStats
from services.gateway.output.sequence import OutputSequence
from services.gateway.request import sending, worker_events
from services.gateway.request.events import Holders
from services.gateway.request.request import Pull, Request
from services.gateway.workers.movers import Movers
from services.gateway.workers.worker import PrefillLoad, Worker
from services.model.text.detokenizer import Detokenizer
from services.model.text.pieces import Pieces
from services.model.text.stop_strings import StopMatcher
from services.protocol.messages import (
    Admit,
    Command,
    Generated,
    Prefilled,
    RequestEvent,
    Requeued,
    RequeueReason,
    Reserved,
    Submit,
)
from services.protocol.ticket import (
    FinishReason,
    SamplingParams,
    Ticket,
    TicketSequence,
    queue_order,
)

PROMPT = (1, 2, 3)
MAX_TOKENS = 6
ROOT = b"r" * 16


class NoMeter:
    def first_token(self, after_s: float) -> None: ...

    def tokens(self, num_tokens: int, after_s: float | None) -> None: ...


class ScriptedHost:
    def __init__(self) -> None:
        self.pull: Pull = Movers(b"").pull
        self.attempt_numbers: Iterator[int] = itertools.count(1)
        self.ended: list[Exception | None] = []
        self.num_waits = 0

    def on_queued(self, request: Request) -> None:
        self.num_waits += 1

    def on_closed(self, request: Request, error: Exception | None) -> None:
        self.ended.append(error)

    def holders(self, pool_id: str) -> Holders:
        return (("r2", 30),)


class ScriptedWorker(Worker):
    """Keeps all commands."""

    def __init__(self, worker_id: str, role: Role = "decode") -> None:
        self.sent: list[Command] = []
        load = Load(num_free_slots=4)
        super().__init__(
            Member(worker_id, role, "host:1", "serving", 1, 1, "pool", max_num_seqs=4, load=load),
            self.sent.append,
        )
        self.connected = True


def next_token(tokens: Seq[int], index: int = 0) -> int:
    """The next token of the sequence with that index."""
    return zlib.crc32(f"{index}: {list(tokens)}".encode()) % 200 + 1


def expected(num_tokens: int, index: int = 0) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, index))
    return tokens[len(PROMPT) :]


def text_of(token_ids: Seq[int]) -> str:
    return "".join(f"{token_id}," for token_id in token_ids)


def output_of(request: Request) -> Output:
    pieces = [b"%d," % token for token in range(256)]
    assert isinstance(request.asked, GenerationRequest)
    asked = request.asked.sampling
    sequences = [
        OutputSequence(
            index,
            Detokenizer(Pieces(pieces, pieces)),
            StopMatcher(asked.stop),
            frozenset(),
        )
        for index in range(asked.n)
    ]
    clock = asyncio.get_running_loop().time
    stats = RequestStats(len(PROMPT), clock())
    return Output(request.id, stats, sequences, NoMeter(), clock)


class Walk:
    """A request's request with one worker of each kind."""

    def __init__(
        self,
        timeout_s: float | None = None,
        num_sequences: int = 1,
        stop: tuple[str, ...] = (),
        beam: Beam | None = None,
    ) -> None:
        self.prefill, self.decode = ScriptedWorker("p", "prefill"), ScriptedWorker("d")
        self.host = ScriptedHost()
        asked = RequestedSampling(n=num_sequences, stop=stop, beam=beam)
        sampling = SamplingParams(0.0, 0, 1.0, 0.0, 7, MAX_TOKENS, n=num_sequences, beam=beam)
        self.asked = GenerationRequest(PROMPT, sampling=asked, timeout_s=timeout_s)
        self.request = Request(self.asked, "r1", "toy", PROMPT, sampling)
        self.output = self.request.output = output_of(self.request)
        self.request.begin(self.host, queue_order(0, 1))

    def call(self, received: tuple[Received, ...], *, n: int | None = None) -> Request:
        """A call of the same client, with what it has received."""
        request = self.request
        n = n or request.sampling.n
        asked = replace(self.asked, received=received, sampling=replace(self.asked.sampling, n=n))
        call = Request(
            asked,
            request.id,
            request.model,
            PROMPT,
            replace(request.sampling, n=n),
            prompt_logprobs=request.prompt_logprobs,
        )
        call.output = output_of(call)
        call.output.replay(received)
        return call

    def on_event(self, sender: Worker, event: RequestEvent) -> None:
        worker_events.on_event(self.request, sender, event)

    def on_lost(self, worker: Worker, *, died: bool) -> None:
        worker_events.on_lost(self.request, worker, died=died)

    async def reserve(self, granted: bool = True) -> bool:
        asking = asyncio.create_task(sending.reserve(self.request, self.decode, timeout_s=5))
        await asyncio.sleep(0)
        self.on_event(self.decode, Reserved("r1", self.request.attempt.number, granted))
        return await asking

    @property
    def admitted(self) -> Ticket:
        """The ticket that the decode worker got last, with its last command."""
        return admitted_at(self.decode)

    def start(self) -> Ticket:
        sending.submit(self.request, self.prefill, PrefillLoad(3), "pool", ROOT)
        submit = self.prefill.sent[-1]
        assert isinstance(submit, Submit)
        return submit.ticket

    async def until_prefilling(self) -> Ticket:
        """Reserve a decode slot, and submit the request to the prefill worker."""
        assert await self.reserve()
        return self.start()

    def prefilled(self, ticket: Ticket, *ended: FinishReason | None) -> Prefilled:
        """`ended`: how each sequence ended with this token, where it did."""
        outputs, sequences = [], []
        for sequence, finish in itertools.zip_longest(ticket.sequences, ended):
            tokens = (*ticket.prompt_token_ids, *sequence.token_ids)
            token, index = next_token(tokens, sequence.index), sequence.index
            outputs.append(Generated(*ticket.key, index, len(tokens), (token,), finish))
            if finish is None:
                so_far = (*sequence.token_ids, token)
                sequences.append(TicketSequence(index, so_far, (9,), len(tokens)))
        at_rest = replace(ticket, holder_epoch=2, sequences=tuple(sequences))
        return Prefilled(at_rest, tuple(outputs))

    async def until_decoding(self) -> Ticket:
        ticket = await self.until_prefilling()
        self.on_event(self.prefill, self.prefilled(ticket))
        return ticket

    async def tokens(self) -> list[int]:
        """All tokens of the client, to the end."""
        async with asyncio.timeout(5):
            return [t async for delta in self.output for t in delta.token_ids]


def generated(
    walk: Walk, *tokens: int, finish: FinishReason | None = None, skip: int = 0, index: int = 0
) -> Generated:
    """The decode worker's message of the present attempt and position, `skip` tokens later."""
    request = walk.request
    before = [*PROMPT, *request.output.sequences[index].tokens]
    position = len(before) + skip
    return Generated("r1", request.attempt.number, index, position, tokens, finish)


def step(walk: Walk, index: int, num_tokens: int = 1) -> None:
    """The decode worker sends the next tokens of a sequence, and its end if it is reached."""
    so_far = len(walk.output.sequences[index].tokens)
    tokens = expected(so_far + num_tokens, index)[so_far:]
    finish = FinishReason.LENGTH if so_far + num_tokens == MAX_TOKENS else None
    walk.on_event(walk.decode, generated(walk, *tokens, finish=finish, index=index))


def at_rest(walk: Walk, *indices: int) -> Ticket:
    """The decode worker's ticket of these sequences, with the client's tokens."""
    admits = [command for command in walk.decode.sent if isinstance(command, Admit)]
    sequences = []
    for index in indices:
        tokens = tuple(walk.output.sequences[index].tokens)
        sequences.append(TicketSequence(index, tokens, (9, 10), len(PROMPT) + len(tokens) - 1))
    attempt = walk.request.attempt.number
    return replace(admits[-1].ticket, attempt=attempt, holder_epoch=4, sequences=tuple(sequences))


def admitted_at(worker: ScriptedWorker) -> Ticket:
    admit = worker.sent[-1]
    assert isinstance(admit, Admit)
    return admit.ticket


def abort_detached(walk: Walk) -> None:
    """Abort a ticket, as the placement does if the ticket's pool has no slots."""
    detached = walk.request.attempt.detached
    assert detached is not None
    detached.abort()


def requeued(walk: Walk, ticket: Ticket) -> Requeued:
    return Requeued("r1", walk.request.attempt.number, RequeueReason.HANDED_OVER, ticket)


async def deltas_of(walk: Walk) -> dict[int, list[Delta]]:
    """The deltas of each sequence, to the end."""
    deltas: dict[int, list[Delta]] = {}
    async with asyncio.timeout(5):
        async for delta in walk.output:
            deltas.setdefault(delta.index, []).append(delta)
    return deltas


async def tokens_of(walk: Walk) -> dict[int, list[int]]:
    deltas = await deltas_of(walk)
    return {index: [t for d in each for t in d.token_ids] for index, each in deltas.items()}
