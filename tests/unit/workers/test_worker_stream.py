"""A gateway's stream at a worker, without gRPC below it."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

import pytest

from blockstore.store import FUNCTION_LIBRARY
from quire.v1 import decode_pb2, prefill_pb2, ticket_pb2, worker_pb2
from services.protocol.codec import ticket_to_wire
from services.protocol.version import LIBRARIES, PROTOCOL_VERSION
from services.runtime.errors import InvalidRequest, VersionMismatch
from services.runtime.rpc.message_batching import unpack_batch
from services.worker import stream
from services.worker.pool_worker import PoolWorker
from services.worker.roles.decode import Decode
from services.worker.roles.prefill import Prefill
from services.worker.stream import WorkerStream

from .conftest import WorkerPair
from .fakes import PROMPT, ticket

HELLO = worker_pb2.Hello(
    peer_id="gateway", protocol_version=PROTOCOL_VERSION, function_library=FUNCTION_LIBRARY
)


def connect(
    worker: PoolWorker[Any], *commands: Any, hello: worker_pb2.Hello = HELLO
) -> "aclosing[AsyncGenerator[Any, None]]":
    """The responses to a gateway that says hello and sends these commands; then the stream stays
    open."""
    requests = {Prefill: prefill_pb2.PrefillConnectRequest, Decode: decode_pb2.DecodeConnectRequest}

    async def sent() -> AsyncGenerator[Any, None]:
        for fields in ({"hello": hello}, *commands):
            yield requests[type(worker.role)](**fields)
        await asyncio.Event().wait()

    service: Any = WorkerStream(worker)
    return aclosing(service.Connect(sent(), None))


RESERVE = {"reserve": decode_pb2.Reserve(request_id="r1", attempt=1, num_sequences=1)}


def hello_of(version: int, library: str) -> worker_pb2.Hello:
    return worker_pb2.Hello(peer_id="gateway", protocol_version=version, function_library=library)


async def first_failed(responses: AsyncGenerator[Any, None]) -> Any:
    async with asyncio.timeout(10):
        async for together in responses:
            for response in unpack_batch(together):
                if response.WhichOneof("event") == "failed":
                    return response.failed


async def test_a_ticket_that_is_refused_leaves_no_slot_taken(pair: WorkerPair) -> None:
    """The gateway is told that the request failed, and sends no abort after that."""
    wrong = ticket_to_wire(ticket("r1", PROMPT, pool_id="another"))
    admit = {"admit": decode_pb2.Admit(ticket=wrong)}
    async with connect(pair.decode, RESERVE, admit) as responses:
        failed = await first_failed(responses)
        assert (failed.request_id, failed.code) == ("r1", "invalid_request")
        assert pair.decode.role.load().num_free_slots == 16


@pytest.mark.parametrize(
    "command",
    [
        {"resume": decode_pb2.Resume(request_id="r" * 400, attempt=3)},
        {"admit": decode_pb2.Admit(ticket=ticket_pb2.Ticket(request_id="r2", attempt=3))},
        {"reserve": decode_pb2.Reserve(request_id="r" * 400, attempt=3, num_sequences=1)},
    ],
    ids=lambda command: next(iter(command)),
)
async def test_a_senseless_command_ends_its_own_request_only(
    pair: WorkerPair, command: dict[str, Any]
) -> None:
    """Another reservation on the same stream stays."""
    async with connect(pair.decode, RESERVE, command) as responses:
        failed = await first_failed(responses)
        assert failed.request_id in ("r2", "r" * 400)
        assert (failed.attempt, failed.code) == (3, "invalid_request")
        assert pair.decode.role.load().num_free_slots == 15


async def test_a_gateway_of_the_version_before_is_answered_in_its_version(pair: WorkerPair) -> None:
    for version, library in LIBRARIES.items():
        async with connect(pair.decode, hello=hello_of(version, library)) as responses:
            welcome = (await anext(responses)).welcome
            assert (welcome.protocol_version, welcome.function_library) == (version, library)


async def test_a_version_that_is_neither_this_nor_the_one_before_is_refused(
    pair: WorkerPair,
) -> None:
    for version in (PROTOCOL_VERSION - 2, PROTOCOL_VERSION):
        async with connect(pair.decode, hello=hello_of(version, "quire")) as responses:
            with pytest.raises(VersionMismatch, match="gateway speaks"):
                await anext(responses)


async def test_a_command_of_no_request_ends_the_stream(pair: WorkerPair) -> None:
    async with connect(pair.decode, {"resume": decode_pb2.Resume()}) as responses:
        await assert_ends(responses, "request_id is empty")


async def assert_ends(responses: AsyncGenerator[Any, None], reason: str) -> None:
    async with asyncio.timeout(10):
        with pytest.raises(InvalidRequest, match=reason):
            async for _ in responses:
                pass


async def test_a_stream_that_ends_takes_along_what_came_over_it(pair: WorkerPair) -> None:
    async with connect(pair.decode, RESERVE) as responses, asyncio.timeout(10):
        async for together in responses:
            if any(one.WhichOneof("event") == "reserved" for one in unpack_batch(together)):
                break
        assert pair.decode.role.load().num_free_slots == 15
    await pair.until(lambda: pair.decode.role.load().num_free_slots == 16)


@pytest.mark.parametrize("num_unread", [10_000, 10_001])
async def test_a_gateway_that_does_not_read_loses_its_stream(num_unread: int) -> None:
    """Its unread events are kept no longer than the stream."""
    session = stream.StreamSession("gateway")
    for _ in range(num_unread):
        session.put({"welcome": worker_pb2.Welcome()})
    session.finish()
    num_read = sum([len(together) async for together in session.messages()])
    assert num_read == (10_000 if num_unread == 10_000 else 0)


async def test_batched_events_are_sent_together() -> None:
    """The next event follows all of them. Events that are put meanwhile are sent next: otherwise
    there might be no end."""
    session = stream.StreamSession("gateway")
    followed: list[str] = []

    def put(*names: str) -> None:
        for name in names:
            welcome = worker_pb2.Welcome(worker_id=name)
            session.put({"welcome": welcome}, then=partial(followed.append, name))

    messages = session.messages()
    put("a", "b", "c")
    assert _names(await anext(messages)) == ["a", "b", "c"]
    put("d")
    assert not followed
    assert _names(await anext(messages)) == ["d"]
    assert followed == ["a", "b", "c"]
    put("e")
    session.finish()
    assert [_names(together) async for together in messages] == [["e"]]
    assert followed == ["a", "b", "c", "d", "e"]


def _names(together: list[dict[str, Any]]) -> list[str]:
    welcomes = [fields["welcome"] for fields in together]
    return [welcome.worker_id for welcome in welcomes if isinstance(welcome, worker_pb2.Welcome)]


async def test_draining_is_announced_at_once(
    pair: WorkerPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not with the next report: the gateway has to move the running requests."""
    monkeypatch.setattr(stream, "_LOAD_INTERVAL_S", 60.0)
    async with connect(pair.decode) as responses, asyncio.timeout(10):
        reports = [(await anext(responses)).WhichOneof("event"), await anext(responses)]
        assert reports[0] == "welcome"
        assert not reports[1].load.draining
        pair.decode.drain()
        assert (await anext(responses)).load.draining


async def test_a_role_that_is_refused_ends_the_stream_and_leaves_the_worker(
    pair: WorkerPair,
) -> None:
    for role, reason in (("decode", "is a decode worker already"), ("chef", "not for 'chef'")):
        drain = {"drain": worker_pb2.Drain(next_role=role)}
        async with connect(pair.decode, drain) as responses:
            await assert_ends(responses, reason)
    assert not pair.decode.draining


async def test_a_drain_before_the_end_of_a_change_of_role_wins(pair: WorkerPair) -> None:
    """An operator who wants the worker gone gets that. A worker that leaves takes no role again,
    and the same change told twice is one change."""
    worker = pair.decode
    assert worker.drain("prefill") == worker.drain("prefill") == 0
    assert (worker.draining, worker.next_role) == (True, "prefill")
    worker.drain()
    assert worker.next_role is None
    with pytest.raises(InvalidRequest, match="drains already, so it takes no other role"):
        worker.drain("prefill")
    assert worker.next_role is None


async def test_an_attempt_sent_twice_fails_as_a_whole(pair: WorkerPair) -> None:
    pair.prefill_model.gate.clear()
    submit = prefill_pb2.PrefillSubmit(ticket=ticket_to_wire(ticket("r1", PROMPT)))
    async with connect(pair.prefill, {"submit": submit}, {"submit": submit}) as responses:
        assert (await first_failed(responses)).request_id == "r1"
        pair.prefill_model.gate.set()
        await pair.until_empty()
        await pair.until(lambda: not pair.prefill.role.jobs)
