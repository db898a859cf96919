"""Failures of a worker's stream on the gateway's side."""

import asyncio
from typing import Any

import pytest
from structlog.testing import capture_logs

from blockstore.registry import Member
from quire.supervisor.run_directory import free_port
from quire.v1 import decode_pb2, worker_pb2
from services.gateway.workers.connection import WorkerConnection
from services.protocol.messages import Reserve
from services.protocol.version import PROTOCOL_VERSION
from services.runtime.errors import NoWorker
from services.runtime.rpc.proof import Guard
from services.runtime.rpc.transport import RpcServer
from tests.secret import OTHER, SECRET
from tests.waiting import until

from .conftest import Call, asked, finish
from .fakes import FakeDecode, FakePrefill, member


async def test_an_unsendable_message_fails_one_request(harness: Any) -> None:
    """The other requests on the stream go on."""
    _, decode = harness.workers
    decode.pause_after = 4
    call = Call(harness.gateway, asked())
    await until(lambda: len(call.tokens) == 4)
    (worker,) = harness.assembly.directory.decode_workers()["pool"]
    with pytest.raises(ValueError, match="range"):
        worker.send(Reserve("r2", attempt=-1))
    decode.go_on(pause_after=8)
    await finish(call)
    assert decode.num_hellos == 1


async def test_a_fault_of_ours_does_not_lose_the_worker(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = harness.workers
    on_event = harness.assembly.dispatcher.on_event

    def fail_once(*_: Any) -> None:
        monkeypatch.setattr(harness.assembly.dispatcher, "on_event", on_event)
        raise RuntimeError("not thought of")

    monkeypatch.setattr(harness.assembly.dispatcher, "on_event", fail_once)
    await until(lambda: sum(worker.num_hellos for worker in workers) == 3)
    await finish(Call(harness.gateway, asked()))


class Undecodable:
    """The result of a stream's deserializer for bytes that are not a message."""

    def SerializeToString(self) -> bytes:
        return b"\xff\xff"


@pytest.mark.parametrize("wrong", ["undecodable", "senseless"])
async def test_a_wrong_message_ends_the_stream_which_is_begun_again(
    harness: Any, wrong: str
) -> None:
    """Whatever the message was about, no request waits for an answer that cannot come, and no
    client sees more of it than a delay."""
    _, decode = harness.workers
    decode.pause_after = 4
    calls = [Call(harness.gateway, asked(f"r{number}")) for number in range(2)]
    await until(lambda: all(len(call.tokens) == 4 for call in calls))
    if wrong == "undecodable":
        decode.sessions[0].send_verbatim(Undecodable())
    else:
        output = worker_pb2.SequenceOutput(
            request_id="r0",
            attempt=decode.running["r0"].ticket.attempt,
            finish_reason=99,  # type: ignore[arg-type]
        )
        decode.sessions[0].send(step=decode_pb2.StepOutput(outputs=[output]))
    await until(lambda: decode.num_hellos == 2)
    decode.go_on(pause_after=8)
    await finish(*calls)


@pytest.mark.parametrize(
    ("guard", "problem"),
    [
        (None, "does not prove this deployment's secret"),
        (Guard(OTHER.rpc_key, "prefill-1"), "made with another secret"),
    ],
)
async def test_a_server_without_the_secret_gets_a_hello_and_nothing_else(
    make_harness: Any, guard: Guard | None, problem: str
) -> None:
    """A process that listens at a dead worker's address, and repeats the worker's signed entry."""
    harness, stranger = await make_harness(FakeDecode(), patience_s=0.2), FakePrefill()
    server = RpcServer(stranger.service, guard=guard)
    stranger.register(server.aio)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    harness.stack.push_async_callback(server.stop)
    entry = member(stranger, address, str(harness.model_dir))
    with capture_logs() as logs:
        await harness.registry.announce(entry, ttl_s=1e6)
        await until(lambda: problem in str(logs))
        with pytest.raises(NoWorker):
            await Call(harness.gateway, asked()).result()
    assert bool(stranger.num_hellos) == (guard is None)
    assert not stranger.seen


async def test_cancellation_while_a_stream_closes_is_kept(make_harness: Any) -> None:
    harness = await make_harness(FakePrefill())
    member = Member("nobody", "decode", "127.0.0.1:1", "serving", 1, PROTOCOL_VERSION)
    peer = WorkerConnection(member, "gateway", SECRET.rpc_key, harness.assembly.dispatcher)
    await asyncio.sleep(0)
    closing = asyncio.create_task(peer.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()


async def test_a_connection_closes_in_the_moment_in_which_it_fails(make_harness: Any) -> None:
    """Otherwise the directory, which closes it, would see no other worker any more."""
    harness = await make_harness(FakePrefill())
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    member = Member("nobody", "decode", address, "serving", 1, PROTOCOL_VERSION)
    for number in range(100):
        sink = harness.assembly.dispatcher
        peer = WorkerConnection(member, "gateway", SECRET.rpc_key, sink)
        await asyncio.sleep(number % 50 * 1e-4)
        async with asyncio.timeout(5):
            await peer.close()
