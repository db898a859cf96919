"""A hostile gateway at the workers' streams: with any commands, and any knowledge of another
gateway's request, that request goes on undisturbed wherever it moves, as one sequence, a group or a
search. No row reads a block of another holder, and nothing of the hostile gateway is left when its
streams have ended."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from blockstore.memory_store import MemoryStore
from quire.v1 import prefill_pb2
from services.protocol.codec import ticket_to_wire
from services.protocol.fields import from_wire
from services.protocol.ticket import Ticket, TicketState
from services.worker.requests import holder_writes
from tests.fuzz.correct_gateway import CORRECT_REQUESTS, NUM_TOKENS, Answer, Gateway, expected_of
from tests.fuzz.hostile_gateway import (
    FORGED_COMMANDS,
    OWN_TICKETS,
    SWAPPED_TICKET,
    ForgedCommand,
    send_forged,
    without_secrets,
)
from tests.fuzz.pool_workers import HELLO, Workers
from tests.unit.workers.fakes import next_token

MOVES = st.lists(st.sampled_from(["handed over", "swapped out", "parked"]), max_size=2)


async def run_correct_gateway(
    workers: Workers,
    asked: Ticket,
    moves: Sequence[str],
    midway: Callable[[Ticket], Awaitable[None]],
) -> Answer:
    """The request gets its tokens, however it moves. `midway`: called each time that it is at
    rest."""
    gateway = Gateway(workers, asked)
    detached = await gateway.prefill(asked)
    for move in moves:
        await midway(detached)
        running = await gateway.decode(detached, to_the_end=False)
        if not gateway.is_over:
            detached = await gateway.moved(move, running)
        if gateway.is_over:
            break
    else:
        await midway(detached)
        await gateway.decode(detached, to_the_end=True)
    await gateway.end()
    return gateway.answer


async def swapped_out(gateway: Gateway, workers: Workers, asked: Ticket) -> Ticket:
    """A ticket whose KV is in the swap pool."""
    detached = await gateway.prefill(asked)
    decode = workers.models[1]
    decode.pause_after = 2
    await gateway.decode(detached, to_the_end=False)
    await workers.until(lambda: not decode.gate.is_set())
    workers.demand(detached.holder_id)
    decode.gate.set()
    back = await gateway.back()
    assert back.swapped
    return back


async def run_attack(
    directory: Path,
    asked: Ticket,
    moves: Sequence[str],
    before: Sequence[ForgedCommand],
    during: Sequence[ForgedCommand],
) -> None:
    workers = Workers(MemoryStore())
    await workers.open(directory)
    streams = workers.connect()
    gateway = Gateway(workers, SWAPPED_TICKET)
    tickets = {name: ticket_to_wire(one) for name, one in OWN_TICKETS.items()}
    try:
        for stream in streams:
            stream.send(hello=HELLO)
        tickets["swapped"] = ticket_to_wire(await swapped_out(gateway, workers, SWAPPED_TICKET))
        for name in OWN_TICKETS:
            streams[0].send(submit=prefill_pb2.PrefillSubmit(ticket=tickets[name]))
        await workers.until(lambda: len(streams[0].events_of("prefilled")) == len(OWN_TICKETS))
        of = {one.request_id: name for name, one in OWN_TICKETS.items()}
        for prefilled in streams[0].events_of("prefilled"):
            name, state = of[prefilled.ticket.request_id], from_wire(TicketState, prefilled.ticket)
            tickets[f"issued {name}"] = ticket_to_wire(OWN_TICKETS[name].with_state(state))

        async def attack(commands: Sequence[ForgedCommand]) -> None:
            for command in commands:
                send_forged(command, streams, tickets)
                await asyncio.sleep(0.001 if command.pause else 0)

        async def midway(detached: Ticket) -> None:
            tickets["correct"] = without_secrets(ticket_to_wire(detached))
            await attack(before)
            attacks.append(asyncio.create_task(attack(during)))

        attacks: list[asyncio.Task[None]] = []
        assert await run_correct_gateway(workers, asked, moves, midway) == expected_of(asked)
        await asyncio.gather(*attacks)
        await asyncio.gather(*(stream.end() for stream in streams), gateway.end())
        await workers.check_empty()
    finally:
        await workers.close()


@pytest.fixture(autouse=True)
def short_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """The preempted request does not delay the others for long."""
    monkeypatch.setattr(holder_writes, "_RETURNING_WAITER_S", 0.02)


@pytest.mark.parametrize("kind", ["one", pytest.param("group", marks=pytest.mark.full), "search"])
@given(moves=MOVES, before=FORGED_COMMANDS, during=FORGED_COMMANDS)
@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
def test_a_hostile_gateway_changes_no_other_request(
    tmp_path: Path,
    kind: str,
    moves: Sequence[str],
    before: Sequence[ForgedCommand],
    during: Sequence[ForgedCommand],
) -> None:
    asyncio.run(run_attack(tmp_path, CORRECT_REQUESTS[kind], moves, before, during))


def test_each_correct_request_has_its_own_tokens() -> None:
    one, group, search = (expected_of(asked) for asked in CORRECT_REQUESTS.values())
    assert one[0][0] == next_token(CORRECT_REQUESTS["one"].prompt_token_ids)
    assert sorted(group) == [0, 1, 2]
    assert all(len(tokens) == NUM_TOKENS for tokens in (*group.values(), *search.values()))
    assert search[0] != search[1]
