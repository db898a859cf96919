"""Clients without a key, or with slow messages, hold little of a server's memory."""

import asyncio
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.v1 import inference_pb2_grpc
from services.runtime.rpc import arrivals, interceptor
from services.runtime.rpc.transport import RpcServer, open_channel
from tests.secret import guard

from .test_rpc import SERVICE, Inference, Start, read, start

__all__ = ["start"]


async def test_a_call_without_proof_is_refused_before_its_message_arrives() -> None:
    """A client that may not call takes no memory for its message."""
    server = RpcServer(SERVICE, guard=guard("gateway"))
    inference_pb2_grpc.add_InferenceServicer_to_server(Inference(), server.aio)
    port = await server.start("127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        for method in ("ListModels", "Generate"):
            silent: Any = channel.stream_stream(f"/{SERVICE}/{method}")()
            assert await asyncio.wait_for(silent.code(), 10) is grpc.StatusCode.UNAUTHENTICATED
    await server.stop()


@pytest.mark.parametrize(
    "method",
    [
        "quire.v1.Inference/ListModels",
        "grpc.health.v1.Health/Check",
        "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_of_many_slow_messages_the_oldest_gives_way(start: Start, method: str) -> None:
    """gRPC buffers 16 MiB for each call whose message is not whole, so these calls are bounded."""
    channel = await start(Inference())
    calls: list[Any] = []
    for _ in range(arrivals.MAX_SLOW + 2):
        calls.append(channel.stream_stream(f"/{method}")())
        await calls[-1].wait_for_connection()
    codes = [asyncio.create_task(call.code()) for call in calls]
    done: set[asyncio.Task[grpc.StatusCode]] = set()
    while len(done) < 2:
        done, _ = await asyncio.wait(codes, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        assert done
    assert {task.result() for task in done} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
    for call in calls:
        call.cancel()


async def test_a_call_without_a_message_is_refused(start: Start) -> None:
    channel = await start(Inference())
    call: Any = channel.stream_stream(f"/{SERVICE}/ListModels")()
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_watched_health_is_bounded_and_checks_are_not(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Anybody may watch, without a key and without an end."""
    monkeypatch.setattr(interceptor, "MAX_OPEN_STREAMS", 2)
    stub = health_pb2_grpc.HealthStub(await start(Inference()))
    request = health_pb2.HealthCheckRequest()
    watches = [stub.Watch(request) for _ in range(2)]
    for watch in watches:
        await read(watch)
    assert await stub.Watch(request).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await stub.Check(request)
    watches[0].cancel()
    async with asyncio.timeout(10):
        while not await reads(another := stub.Watch(request)):
            pass
    for watch in (another, watches[1]):
        watch.cancel()


async def reads(call: Any) -> bool:
    try:
        return await call.read() is not grpc.aio.EOF
    except grpc.aio.AioRpcError:
        return False
