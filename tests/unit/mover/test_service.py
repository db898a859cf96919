"""The answers of a mover to the gateway that asked for a pull."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from quire.v1 import mover_pb2 as pb
from services.mover import service as services
from services.mover.service import MoverService
from services.protocol.codec import ticket_to_wire
from services.protocol.fields import from_wire
from services.protocol.ticket import SamplingParams, Ticket, TicketSequence, TicketState
from services.runtime.errors import Unavailable

TICKET = Ticket(
    "r",
    1,
    1,
    "h",
    2,
    pool_id="a",
    root_hash=b"r" * 16,
    prompt_token_ids=(1, 2, 3),
    sampling=SamplingParams(0.0, 0, 1.0, 0.0, 1, 8),
    sequences=(TicketSequence(0, (4,), (0,), 3),),
)
REQUEST = pb.PullRequest(ticket=ticket_to_wire(TICKET), source_pool_id="a")


class SlowMover:
    """Its pull ends when a test says so."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Ticket | None] = asyncio.get_running_loop().create_future()
        self.has_ended = False

    @asynccontextmanager
    async def pulling(self, ticket: Ticket, source_pool_id: str) -> AsyncIterator[Any]:
        assert (ticket, source_pool_id) == (TICKET, "a")
        try:
            yield self.answer, SimpleNamespace(num_blocks=1)
        finally:
            self.has_ended = True


@pytest.fixture
async def mover(monkeypatch: pytest.MonkeyPatch) -> SlowMover:
    monkeypatch.setattr(services, "_COPYING_S", 0.01)
    return SlowMover()


def calling(mover: Any) -> Any:
    header: Any = SimpleNamespace(dump=bytes)
    return MoverService(mover, header, "nixl", b"").Pull(REQUEST, None)


async def test_a_pull_that_takes_long_says_so_until_its_answer(mover: SlowMover) -> None:
    call = calling(mover)
    for _ in range(3):
        assert await anext(call) == pb.PullResponse(copying=True)
    moved = replace(TICKET, holder_epoch=4)
    mover.answer.set_result(moved)
    answer = await anext(call)
    assert (answer.copying, answer.num_blocks) == (False, 1)
    assert from_wire(TicketState, answer.ticket) == moved.state
    assert not mover.has_ended, "the ticket is the mover's until the call ends"
    await call.aclose()
    assert mover.has_ended


async def test_a_pull_that_fails_ends_the_call(mover: SlowMover) -> None:
    call = calling(mover)
    await anext(call)
    mover.answer.set_exception(Unavailable("nothing was pulled"))
    with pytest.raises(Unavailable, match="nothing was pulled"):
        await anext(call)
    assert mover.has_ended
