"""A journey, with workers that a test plays by hand."""

import asyncio
import itertools
import zlib
from collections.abc import Sequence as Seq
from dataclasses import replace

from blockstore.registry import Load, Member, Role
from services.common.text.detokenizer import Detokenizer
from services.common.text.pieces import Pieces
from services.common.text.stop_strings import StopMatcher
from services.common.ticket import BeamParams, FinishReason, SamplingParams, Ticket, TicketSequence
from services.gateway.admission import Admitted
from services.gateway.journey import Journey, Start
from services.gateway.line import Place
from services.gateway.messages import Command, Generated, Prefilled, Reserved, Submit
from services.gateway.output import Output, Tally
from services.gateway.sequence import Sequence
from services.gateway.text import Text
from services.gateway.worker import Errand, Worker

PROMPT = (1, 2, 3)
MAX_TOKENS = 6
ROOT = b"r" * 16


class NoMeter:
    def first_token(self, after_s: float) -> None: ...

    def tokens(self, num_tokens: int, after_s: float | None) -> None: ...


class ScriptedDesk:
    def __init__(self) -> None:
        self.ended: list[Exception | None] = []
        self.num_waits = 0

    def waits_again(self, journey: Journey) -> None:
        self.num_waits += 1

    def has_ended(self, journey: Journey, error: Exception | None) -> None:
        self.ended.append(error)


class ScriptedWorker(Worker):
    """Keeps what it is sent."""

    def __init__(self, worker_id: str, role: Role = "decode") -> None:
        self.sent: list[Command] = []
        load = Load(num_free_slots=4)
        super().__init__(
            Member(worker_id, role, "host:1", "serving", 1, 1, max_num_seqs=4, load=load),
            self.sent.append,
        )
        self.connected = True


def next_token(tokens: Seq[int], index: int = 0) -> int:
    """Of the sequence with that index."""
    return zlib.crc32(f"{index}: {list(tokens)}".encode()) % 200 + 1


def expected(num_tokens: int, index: int = 0) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, index))
    return tokens[len(PROMPT) :]


def text_of(token_ids: Seq[int]) -> str:
    return "".join(f"{token_id}," for token_id in token_ids)


def output_of(request: Admitted) -> Output:
    pieces = [b"%d," % token for token in range(256)]
    sequences = [
        Sequence(
            index,
            Text(Detokenizer(Pieces(pieces, pieces)), StopMatcher(request.stop)),
            frozenset(),
        )
        for index in range(request.num_sequences)
    ]
    tally, clock = Tally(len(PROMPT), 0.0), asyncio.get_running_loop().time
    return Output(request.request_id, tally, sequences, NoMeter(), clock)


class Walk:
    """A journey with one worker of each kind."""

    def __init__(
        self,
        deadline: float | None = None,
        num_sequences: int = 1,
        stop: tuple[str, ...] = (),
        beam: BeamParams | None = None,
    ) -> None:
        self.prefill, self.decode = ScriptedWorker("p", "prefill"), ScriptedWorker("d")
        self.desk = ScriptedDesk()
        sampling = SamplingParams(0.0, 0, 1.0, 0.0, 7, MAX_TOKENS, beam=beam)
        request = Admitted(
            *("r1", "toy", PROMPT, sampling, stop, 0, "", 0.0, deadline, 256, num_sequences)
        )
        self.output = output_of(request)
        self.journey = Journey(request, Place(0, 1), self.output, self.desk, itertools.count(1))

    async def reserve(self, granted: bool = True) -> bool:
        asking = asyncio.create_task(self.journey.reserve(self.decode, timeout_s=5))
        await asyncio.sleep(0)
        self.journey.on_event(self.decode, Reserved("r1", self.journey.attempt, granted))
        return await asking

    def start(self) -> Ticket:
        self.journey.start(Start("pool", ROOT, self.prefill, Errand(3)))
        submit = self.prefill.sent[-1]
        assert isinstance(submit, Submit)
        return submit.ticket

    def prefilled(self, ticket: Ticket, *ended: FinishReason | None) -> Prefilled:
        """`ended`: how each sequence ended with this token, as far as they are said."""
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
        assert await self.reserve()
        ticket = self.start()
        self.journey.on_event(self.prefill, self.prefilled(ticket))
        return ticket

    async def tokens(self) -> list[int]:
        """All that the client gets, to the end."""
        async with asyncio.timeout(5):
            return [t async for delta in self.output.deltas() for t in delta.token_ids]


def generated(
    walk: Walk,
    *tokens: int,
    finish: FinishReason | None = None,
    skip: int = 0,
    index: int = 0,
) -> Generated:
    """What the decode worker says of the attempt and position of the moment, `skip` tokens on."""
    journey = walk.journey
    position = len(PROMPT) + len(journey.client.output.sequences[index].tokens) + skip
    return Generated("r1", journey.attempt, index, position, tokens, finish)
