"""A gateway that takes a request through prefill and decode wherever it moves, and compares the
events with the expected ones."""

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from quire.types import Beam
from quire.v1 import decode_pb2, prefill_pb2, worker_pb2
from services.engine.batch import Draw
from services.protocol.codec import ticket_to_wire
from services.protocol.fields import from_wire
from services.protocol.ticket import Ticket, TicketSequence, TicketState
from tests.fuzz.hostile_gateway import CORRECT_PROMPT
from tests.fuzz.pool_workers import HELLO, Workers
from tests.unit.workers.fakes import GREEDY, SAMPLED, expected, ticket
from tests.unit.workers.searches import right

NUM_TOKENS = 24


def _asked(**changes: Any) -> Ticket:
    """The request is first in line, before any number of others."""
    return ticket("r1", CORRECT_PROMPT, max_tokens=NUM_TOKENS, attempt=7, order=0, **changes)


CORRECT_REQUESTS = {
    "one": _asked(),
    "group": replace(
        _asked(sequences=tuple(TicketSequence(index) for index in range(3))),
        sampling=replace(SAMPLED, max_tokens=NUM_TOKENS),
    ),
    "search": replace(_asked(), sampling=replace(GREEDY, max_tokens=NUM_TOKENS, n=2, beam=Beam(3))),
}

Answer = dict[int, list[int]]
"""The tokens of each sequence, by index."""


def expected_of(asked: Ticket) -> Answer:
    if asked.sampling.beam is not None:
        return {index: list(one.token_ids) for index, one in enumerate(right(asked))}
    prompt, number = asked.prompt_token_ids, asked.sampling.max_tokens
    indices = [state.index for state in asked.sequences]
    return {index: expected(prompt, number, Draw(asked.sampling, index)) for index in indices}


class Gateway:
    def __init__(self, workers: Workers, asked: Ticket) -> None:
        self._workers = workers
        self._asked = asked
        self._searches = asked.sampling.beam is not None
        self._attempt = asked.attempt
        self._prefill, decode = workers.connect()
        self._decodes = [decode]
        for stream in (self._prefill, decode):
            stream.send(hello=HELLO)

    async def prefill(self, asked: Ticket) -> Ticket:
        """The ticket with blocks, at rest."""
        self._attempt += 1
        asked = replace(asked, attempt=self._attempt, holder_id=f"h-{asked.request_id}")
        if self._prefill.events_of("prefilled"):
            asked = replace(asked, holder_id=f"h-{asked.request_id}-{self._attempt}")
        num_before = len(self._prefill.events_of("prefilled"))
        self._prefill.send(submit=prefill_pb2.PrefillSubmit(ticket=ticket_to_wire(asked)))
        await self._workers.until(lambda: len(self._prefill.events_of("prefilled")) > num_before)
        issued = self._prefill.events_of("prefilled")[-1].ticket
        return self._asked.with_state(from_wire(TicketState, issued))

    async def decode(self, detached: Ticket, *, to_the_end: bool) -> Ticket:
        """Decode until there is a new token, or the answer is complete. Returns the ticket that
        runs."""
        self._attempt += 1
        key: dict[str, Any] = {"request_id": detached.request_id, "attempt": self._attempt}
        detached = replace(detached, attempt=self._attempt)
        num_before, num_back = self._num_received, self._num_back
        reserve = decode_pb2.Reserve(num_sequences=detached.width, **key)
        self._decodes[-1].send(reserve=reserve)
        self._decodes[-1].send(admit=decode_pb2.Admit(ticket=ticket_to_wire(detached)))
        await self._workers.until(
            lambda: (
                self.is_over
                or self._num_back > num_back
                or (not to_the_end and self._num_received > num_before)
            )
        )
        if self._num_back == num_back or self.is_over:
            return detached
        # Others wanted its blocks.
        assert self._last_requeue.reason == worker_pb2.Requeue.REASON_PREEMPTED, (
            "somebody else has claimed it"
        )
        again = await self.prefill(await self.back())
        return await self.decode(again, to_the_end=to_the_end)

    async def moved(self, move: str, detached: Ticket) -> Ticket:
        """The ticket, moved and at rest again, after a recompute if necessary; None if the request
        has ended."""
        num_back = self._num_back
        key: dict[str, Any] = {"request_id": detached.request_id, "attempt": self._attempt}
        match move:
            case "handed over":
                self._decodes[-1].send(hand_over=decode_pb2.HandOver(**key))
            case "swapped out":
                self._workers.demand(detached.holder_id)
            case "parked":
                await self._resume()
        await self._workers.until(lambda: self.is_over or self._num_back > num_back)
        if self._num_back == num_back:
            return detached
        back = await self.back()
        return back if back.sequences[0].block_ids else await self.prefill(back)

    async def back(self) -> Ticket:
        """The last ticket that the decode worker returned."""
        await self._workers.until(lambda: bool(self._decodes[-1].events_of("requeue")))
        return self._asked.with_state(from_wire(TicketState, self._last_requeue.ticket))

    async def _resume(self) -> None:
        """Another gateway takes over the request of a lost one."""
        await self._decodes[-1].end()
        self._decodes.append(self._workers.connect()[1])
        self._attempt += 1
        self._decodes[-1].send(hello=HELLO)
        self._decodes[-1].send(
            resume=decode_pb2.Resume(
                request_id=self._asked.request_id, attempt=self._attempt, digest=self._asked.digest
            )
        )

    @property
    def answer(self) -> Answer:
        """The tokens by position; no position may get two different tokens."""
        found: dict[int, dict[int, int]] = {}
        for index, position, token in self._received():
            of_one = found.setdefault(index, {})
            assert of_one.setdefault(position, token) == token
        return {
            index: [of_one[position] for position in sorted(of_one)]
            for index, of_one in sorted(found.items())
        }

    def _received(self) -> Iterator[tuple[int, int, int]]:
        """(index, position, token). The tokens of beams are not part of an answer."""
        first = len(self._asked.prompt_token_ids)
        for decode in () if self._searches else self._decodes:
            for requeue in decode.events_of("requeue"):
                for sequence in requeue.ticket.sequences:
                    for position, token in enumerate(sequence.token_ids, first):
                        yield sequence.index, position, token
        for output in self._outputs():
            for position, token in enumerate(output.token_ids, output.position):
                yield output.index, position, token

    def _outputs(self) -> Iterator[Any]:
        for prefilled in self._prefill.events_of("prefilled"):
            yield from prefilled.outputs
        for decode in self._decodes:
            for step in decode.events_of("step"):
                yield from step.outputs

    @property
    def _num_received(self) -> int:
        """The number of tokens received; for a search, of steps."""
        return sum(1 for _ in (self._outputs() if self._searches else self._received()))

    @property
    def _ended(self) -> set[int]:
        return {output.index for output in self._outputs() if output.finish_reason}

    @property
    def is_over(self) -> bool:
        streams = (self._prefill, *self._decodes)
        failed = [failure for stream in streams for failure in stream.events_of("failed")]
        assert not failed
        sampling = self._asked.sampling
        num_wanted = len(self._asked.sequences) if sampling.beam is None else sampling.n
        return len(self._ended) == num_wanted

    @property
    def _num_back(self) -> int:
        return sum(len(decode.events_of("requeue")) for decode in self._decodes)

    @property
    def _last_requeue(self) -> Any:
        return self._decodes[-1].events_of("requeue")[-1]

    async def end(self) -> None:
        await asyncio.gather(self._prefill.end(), self._decodes[-1].end())
