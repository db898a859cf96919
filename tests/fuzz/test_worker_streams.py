"""A hostile gateway at the workers' streams: whatever it says, and however well it knows somebody
else's request, that request goes on untouched wherever it moves, no row reads a block that is not
its holder's, and of the hostile one nothing is left when its streams have ended."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockstore.memory_store import MemoryStore
from quire.v1 import decode_pb2, prefill_pb2
from services.common.ticket import Ticket, TicketSequence
from services.common.wire import ticket_from_wire, ticket_to_wire
from tests.fuzz.hostile_gateway import HONEST, MINE, SAYINGS, Say, utter, without_secrets
from tests.fuzz.pool_workers import HELLO, Workers
from tests.unit.workers.fakes import expected, next_token, ticket

HONEST_TOKENS = expected(HONEST.prompt_token_ids, 24)
MOVES = st.lists(st.sampled_from(["handed over", "swapped out", "parked"]), max_size=2)


class Gateway:
    """One that takes a request through prefill and decode, and hears what becomes of it."""

    def __init__(self, workers: Workers, asked: Ticket) -> None:
        self._workers = workers
        self._asked = asked
        self._attempt = asked.attempt
        self._prefill, decode = workers.connect()
        self._decodes = [decode]
        for stream in (self._prefill, decode):
            stream.say(hello=HELLO)

    async def prefill(self, asked: Ticket) -> Ticket:
        """The ticket with blocks, at rest."""
        self._attempt += 1
        asked = replace(asked, attempt=self._attempt, holder_id=f"h-{asked.request_id}")
        if self._prefill.hear("prefilled"):
            asked = replace(asked, holder_id=f"h-{asked.request_id}-{self._attempt}")
        num_before = len(self._prefill.hear("prefilled"))
        self._prefill.say(submit=prefill_pb2.PrefillSubmit(ticket=ticket_to_wire(asked)))
        await self._workers.until(lambda: len(self._prefill.hear("prefilled")) > num_before)
        issued = self._prefill.hear("prefilled")[-1].ticket
        return ticket_from_wire(issued, may_have_ended=True)

    async def decode(self, at_rest: Ticket, *, to_the_end: bool) -> None:
        """Until it has a token more, or all of them."""
        self._attempt += 1
        key: dict[str, Any] = {"request_id": at_rest.request_id, "attempt": self._attempt}
        admit = decode_pb2.Admit(ticket=ticket_to_wire(replace(at_rest, attempt=self._attempt)))
        num_before, num_back = len(self.tokens), self._num_back
        self._decodes[-1].say(reserve=decode_pb2.Reserve(num_sequences=1, **key))
        self._decodes[-1].say(admit=admit)
        await self._workers.until(
            lambda: self.is_over or (not to_the_end and len(self.tokens) > num_before)
        )
        assert self._num_back == num_back, "somebody else has claimed it"

    async def moved(self, move: str, at_rest: Ticket) -> Ticket:
        """The ticket at rest again, computed again if need be; unless it is over before."""
        num_back = self._num_back
        key: dict[str, Any] = {"request_id": at_rest.request_id, "attempt": self._attempt}
        match move:
            case "handed over":
                self._decodes[-1].say(hand_over=decode_pb2.HandOver(**key))
            case "swapped out":
                self._workers.demand(at_rest.holder_id)
            case "parked":
                await self._resume()
        await self._workers.until(lambda: self.is_over or self._num_back > num_back)
        if self._num_back == num_back:
            return at_rest
        back = await self.back()
        return back if back.sequences[0].block_ids else await self.prefill(back)

    async def back(self) -> Ticket:
        """The last ticket that the decode worker gave back, once it has."""
        await self._workers.until(lambda: bool(self._decodes[-1].hear("requeue")))
        return ticket_from_wire(self._decodes[-1].hear("requeue")[-1].ticket)

    async def _resume(self) -> None:
        """Its gateway is gone, and another one asks for it."""
        await self._decodes[-1].end()
        self._decodes.append(self._workers.connect()[1])
        self._attempt += 1
        received = TicketSequence(0, tuple(self.tokens))
        wanted = replace(self._asked, attempt=self._attempt, sequences=(received,))
        self._decodes[-1].say(hello=HELLO)
        self._decodes[-1].say(resume=decode_pb2.Resume(ticket=ticket_to_wire(wanted)))

    @property
    def tokens(self) -> list[int]:
        """By position; none is ever told otherwise."""
        tokens: dict[int, int] = {}
        for position, token in self._told():
            assert tokens.setdefault(position, token) == token
        return [tokens[position] for position in sorted(tokens)]

    def _told(self) -> Iterator[tuple[int, int]]:
        first = len(self._asked.prompt_token_ids)
        for decode in self._decodes:
            for requeue in decode.hear("requeue"):
                for sequence in requeue.ticket.sequences:
                    yield from enumerate(sequence.token_ids, first)
        for output in self._outputs():
            yield output.position, output.token_ids[0]

    def _outputs(self) -> Iterator[Any]:
        for prefilled in self._prefill.hear("prefilled"):
            yield from prefilled.outputs
        for decode in self._decodes:
            for step in decode.hear("step"):
                yield from step.outputs

    @property
    def is_over(self) -> bool:
        failed = [said for each in (self._prefill, *self._decodes) for said in each.hear("failed")]
        assert not failed
        return any(output.finish_reason for output in self._outputs())

    @property
    def _num_back(self) -> int:
        return sum(len(decode.hear("requeue")) for decode in self._decodes)

    async def end(self) -> None:
        await asyncio.gather(self._prefill.end(), self._decodes[-1].end())


async def honest(
    workers: Workers, moves: Sequence[str], midway: Callable[[Ticket], Awaitable[None]]
) -> list[int]:
    """Its tokens, however it moves. `midway`: each time that it is at rest."""
    gateway = Gateway(workers, HONEST)
    at_rest = await gateway.prefill(HONEST)
    for move in moves:
        await midway(at_rest)
        await gateway.decode(at_rest, to_the_end=False)
        at_rest = await gateway.moved(move, at_rest)
        if gateway.is_over:
            break
    else:
        await midway(at_rest)
        await gateway.decode(at_rest, to_the_end=True)
    await gateway.end()
    return gateway.tokens


async def swapped_out(gateway: Gateway, workers: Workers, asked: Ticket) -> Ticket:
    """A ticket of which the colder pool has the KV."""
    at_rest = await gateway.prefill(asked)
    decode = workers.models[1]
    decode.pause_after = 2
    await gateway.decode(at_rest, to_the_end=False)
    await workers.until(lambda: not decode.gate.is_set())
    workers.demand(at_rest.holder_id)
    decode.gate.set()
    back = await gateway.back()
    assert back.swapped
    return back


async def live(
    directory: Path, moves: Sequence[str], before: Sequence[Say], amid: Sequence[Say]
) -> None:
    workers = Workers(MemoryStore())
    await workers.open(directory)
    streams = workers.connect()
    mine = ticket("r3", range(20, 30), max_tokens=12)
    gateway = Gateway(workers, mine)
    tickets = {"fresh": ticket_to_wire(MINE)}
    try:
        for stream in streams:
            stream.say(hello=HELLO)
        tickets["swapped"] = ticket_to_wire(await swapped_out(gateway, workers, mine))
        streams[0].say(submit=prefill_pb2.PrefillSubmit(ticket=tickets["fresh"]))
        await workers.until(lambda: bool(streams[0].hear("prefilled")))
        tickets["issued"] = streams[0].hear("prefilled")[0].ticket

        async def attack(sayings: Sequence[Say]) -> None:
            for saying in sayings:
                utter(saying, streams, tickets)
                await asyncio.sleep(0.001 if saying.pause else 0)

        async def midway(at_rest: Ticket) -> None:
            tickets["honest"] = without_secrets(ticket_to_wire(at_rest))
            await attack(before)
            attacks.append(asyncio.create_task(attack(amid)))

        attacks: list[asyncio.Task[None]] = []
        assert await honest(workers, moves, midway) == HONEST_TOKENS
        await asyncio.gather(*attacks)
        await asyncio.gather(*(stream.end() for stream in streams), gateway.end())
        await workers.check_empty()
    finally:
        await workers.close()


@given(moves=MOVES, before=SAYINGS, amid=SAYINGS)
@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_hostile_gateway_harms_nobody(
    tmp_path: Path, moves: Sequence[str], before: Sequence[Say], amid: Sequence[Say]
) -> None:
    asyncio.run(live(tmp_path, moves, before, amid))


def test_the_honest_ones_tokens_are_its_own() -> None:
    assert HONEST_TOKENS[0] == next_token(HONEST.prompt_token_ids)
