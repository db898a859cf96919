"""Calls of movers that get no answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from blockstore.registry import Member
from quire.v1 import mover_pb2, mover_pb2_grpc
from services.gateway.workers.movers import Movers
from services.protocol.ticket import SamplingParams, Ticket, TicketSequence
from services.runtime.errors import Unavailable
from services.runtime.rpc.proof import Guard
from services.runtime.rpc.transport import RpcServer

SAMPLING = SamplingParams(0.0, 0, 1.0, 0.0, 1, 8)
TICKET = Ticket(
    "r",
    1,
    1,
    "h",
    2,
    pool_id="a",
    root_hash=b"r" * 16,
    prompt_token_ids=(1, 2, 3),
    sampling=SAMPLING,
    sequences=(TicketSequence(0, (4,), (0,), 3),),
)


class SilentMover(mover_pb2_grpc.MoverServicer):
    """Answers no call; `called` and `ended` record the calls."""

    def __init__(self) -> None:
        self.called, self.ended = asyncio.Event(), asyncio.Event()

    async def Describe(self, request: Any, context: Any) -> Any:
        raise NotImplementedError

    async def Pull(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.called.set()
        try:
            await asyncio.Event().wait()
            yield
        finally:
            self.ended.set()


@asynccontextmanager
async def served(mover: SilentMover, guard: Guard | None = None) -> AsyncIterator[Member]:
    server = RpcServer("quire.v1.Mover", guard=guard)
    mover_pb2_grpc.add_MoverServicer_to_server(mover, server.aio)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    fields = {"bandwidth:a": "1000000"}
    yield Member("mover-1", "mover", address, "serving", 1, 1, "b", engine=fields)
    await server.stop()


@pytest.fixture
async def mover() -> AsyncIterator[tuple[SilentMover, Member]]:
    silent = SilentMover()
    async with served(silent) as member:
        yield silent, member


async def test_a_call_that_ends_with_its_channel_fails(mover: tuple[SilentMover, Member]) -> None:
    """This is no cancellation of the request, which would end its attempt without another one."""
    silent, member = mover
    movers = Movers(b"key")
    movers.follow([member])
    pulling = asyncio.create_task(movers.pull(TICKET, "a", "b"))
    async with asyncio.timeout(10):
        await silent.called.wait()
        await movers.close()
        with pytest.raises(Unavailable, match="was ended"):
            await pulling
        await silent.ended.wait()


async def test_calls_go_on_while_the_registry_does_not_list_the_mover(
    mover: tuple[SilentMover, Member],
) -> None:
    silent, member = mover
    movers = Movers(b"key")
    assert movers.follow([member])
    assert movers.bandwidth("a", "b") == 1_000_000
    pulling = asyncio.create_task(movers.pull(TICKET, "a", "b"))
    async with asyncio.timeout(10):
        await silent.called.wait()
        assert movers.follow([])
        assert movers.bandwidth("a", "b") == 0
        await asyncio.sleep(0)
        assert not silent.ended.is_set()
        pulling.cancel()
        await silent.ended.wait()
    await movers.close()


@pytest.mark.parametrize("name", ["mover-0", "mover-2"])
async def test_the_newest_mover_of_a_pool_is_called(
    mover: tuple[SilentMover, Member], name: str
) -> None:
    """The registry lists the dead one, too, before or after it."""
    silent, member = mover
    dead = replace(member, member_id=name, address="127.0.0.1:1", started_unix_ms=0)
    movers = Movers(b"key")
    movers.follow(sorted([dead, member], key=lambda each: each.member_id))
    pulling = asyncio.create_task(movers.pull(TICKET, "a", "b"))
    async with asyncio.timeout(10):
        await silent.called.wait()
    pulling.cancel()
    await asyncio.gather(pulling, return_exceptions=True)
    await movers.close()


class SlowMover(SilentMover):
    """Says `num_messages` times that it still copies, and then, if `is_answered`, that a prefix is
    there."""

    def __init__(self, num_messages: int, is_answered: bool) -> None:
        super().__init__()
        self._num_messages = num_messages
        self._is_answered = is_answered

    async def Pull(self, request: Any, context: Any) -> AsyncIterator[Any]:
        for _ in range(self._num_messages):
            await asyncio.sleep(SILENCE_S / 4)
            yield mover_pb2.PullResponse(copying=True)
        if self._is_answered:
            yield mover_pb2.PullResponse(num_blocks=1)
        await asyncio.Event().wait()


SILENCE_S = 0.4


@pytest.mark.parametrize("is_answered", [True, False])
async def test_a_copy_may_take_long_while_its_mover_says_that_it_goes_on(
    monkeypatch: pytest.MonkeyPatch, is_answered: bool
) -> None:
    monkeypatch.setattr("services.gateway.workers.movers._SILENCE_S", SILENCE_S)
    movers, began = Movers(b"key"), asyncio.get_running_loop().time()
    slow = served(SlowMover(8, is_answered), Guard(b"key", "mover-1"))
    async with slow as member, asyncio.timeout(20):
        movers.follow([member])
        if is_answered:
            assert await movers.pull(TICKET, "a", "b") is None
        else:
            with pytest.raises(Unavailable, match="said nothing for"):
                await movers.pull(TICKET, "a", "b")
        assert asyncio.get_running_loop().time() - began > SILENCE_S
        await movers.close()
