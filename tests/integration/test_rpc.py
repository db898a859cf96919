"""Errors, limits, health and reflection over real grpc.aio servers on port 0."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2

from quire.v1 import inference_pb2, inference_pb2_grpc, prefill_pb2, prefill_pb2_grpc, worker_pb2
from services.runtime import errors
from services.runtime.rpc import transport
from services.runtime.rpc.error_table import RemoteError
from services.runtime.rpc.proof import Proof
from services.runtime.rpc.transport import (
    MAX_MESSAGE_BYTES,
    RpcServer,
    from_rpc_error,
    open_channel,
)
from tests.proxy import Proxy
from tests.secret import SECRET, guard

SERVICE = "quire.v1.Inference"


async def test_a_server_on_the_ipv6_wildcard_serves_ipv4_too() -> None:
    server = RpcServer(SERVICE, guard=guard("gateway"))
    port = await server.start("::", 0)
    for address in ("127.0.0.1", "[::1]"):
        async with open_channel(f"{address}:{port}") as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            await check(health_pb2.HealthCheckRequest(), timeout=10)
    await server.stop()


class Inference(inference_pb2_grpc.InferenceServicer):
    """Fails as it is told; `Generate` counts until it is stopped."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.closed = asyncio.Event()

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        if self.error:
            raise self.error
        return inference_pb2.ListModelsResponse(models=[inference_pb2.Model(id="tiny")])

    async def Explain(self, request: Any, context: Any) -> inference_pb2.ExplainResponse:
        raise NotImplementedError

    async def Embed(self, request: Any, context: Any) -> inference_pb2.EmbedResponse:
        raise NotImplementedError

    async def Generate(
        self, request: Any, context: Any
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        try:
            number = 0
            while True:
                yield inference_pb2.GenerateResponse(request_id=str(number))
                number += 1
                if self.error and number == 2:
                    raise self.error
                await asyncio.sleep(0)
        finally:
            self.closed.set()


class Prefill(prefill_pb2_grpc.PrefillServicer):
    async def Connect(
        self, request_iterator: Any, context: Any
    ) -> AsyncIterator[prefill_pb2.PrefillConnectResponse]:
        async for _ in request_iterator:
            yield prefill_pb2.PrefillConnectResponse(welcome=worker_pb2.Welcome(worker_id="p-1"))
            raise errors.VersionMismatch("protocol 1, not 2")


Start = Callable[[Inference], Awaitable[grpc.aio.Channel]]


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Starts a server with the servicer; returns a channel to it."""
    servers, channels = [], []

    async def start(servicer: Inference) -> grpc.aio.Channel:
        server = RpcServer(SERVICE, "quire.v1.Prefill")
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server.aio)
        prefill_pb2_grpc.add_PrefillServicer_to_server(Prefill(), server.aio)
        port = await server.start("127.0.0.1", 0)
        await server.set_serving(True)
        servers.append(server)
        channels.append(open_channel(f"127.0.0.1:{port}"))
        return channels[-1]

    yield start
    for channel in channels:
        await channel.close()
    for server in servers:
        await server.stop()


async def read(call: Any) -> Any:
    """The stream's next message; fails instead of returning EOF."""
    message = await call.read()
    assert message is not grpc.aio.EOF
    return message


async def list_models(channel: grpc.aio.Channel) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await inference_pb2_grpc.InferenceStub(channel).ListModels(
            inference_pb2.ListModelsRequest()
        )
    return caught.value


async def test_a_domain_error_arrives_as_itself(start: Start) -> None:
    """Status, code and retry delay cross the wire, and the client raises the same class."""
    channel = await start(Inference(errors.QueueFull("the queue is full", retry_delay_s=2.5)))
    error = await list_models(channel)
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert dict(error.trailing_metadata() or ())["grpc-retry-pushback-ms"] == "2500"
    back = from_rpc_error(error)
    assert type(back) is errors.QueueFull
    assert (str(back), back.retry_delay_s) == ("the queue is full", 2.5)


async def test_an_unknown_error_shows_an_id_and_nothing_else(start: Start) -> None:
    error = await list_models(await start(Inference(RuntimeError("the secret"))))
    assert error.code() is grpc.StatusCode.INTERNAL
    assert (error.details() or "").startswith("internal error ")
    assert "secret" not in repr(error)
    back = from_rpc_error(error)
    assert isinstance(back, RemoteError)
    assert back.failure.status is grpc.StatusCode.INTERNAL


async def test_a_peer_failure_is_passed_on_as_it_came(start: Start) -> None:
    """A relay answers with the status, code and text that it got."""
    failed = RemoteError("pool p is unknown", "unknown_pool", grpc.StatusCode.NOT_FOUND)
    error = await list_models(await start(Inference(failed)))
    assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "pool p is unknown")
    assert dict(error.trailing_metadata() or ())["quire-error-code"] == "unknown_pool"


async def test_a_stream_fails_after_its_messages(start: Start) -> None:
    """The messages before the error arrive first."""
    channel = await start(Inference(errors.KVCorrupt("block 3 is not what its hash promised")))
    call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest())
    assert [(await read(call)).request_id for _ in range(2)] == ["0", "1"]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(call)
    assert type(from_rpc_error(caught.value)) is errors.KVCorrupt


async def test_a_bidirectional_stream_is_mapped_too(start: Start) -> None:
    channel = await start(Inference())
    call = prefill_pb2_grpc.PrefillStub(channel).Connect()
    await call.write(prefill_pb2.PrefillConnectRequest(hello=worker_pb2.Hello(peer_id="g")))
    assert (await read(call)).welcome.worker_id == "p-1"
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(call)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert type(from_rpc_error(caught.value)) is errors.VersionMismatch


async def test_cancelling_a_stream_closes_its_generator(start: Start) -> None:
    """At once, not when the garbage collector finds it."""
    servicer = Inference()
    channel = await start(servicer)
    call = inference_pb2_grpc.InferenceStub(channel).Generate(inference_pb2.GenerateRequest())
    await read(call)
    call.cancel()
    async with asyncio.timeout(5):
        await servicer.closed.wait()


async def test_an_undecodable_request_is_invalid(start: Start) -> None:
    channel = await start(Inference())
    call: Any = channel.unary_unary(f"/{SERVICE}/ListModels")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"\xff\xff\xff")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_undecodable_message_of_a_stream_is_invalid(start: Start) -> None:
    channel = await start(Inference())
    call: Any = channel.stream_stream("/quire.v1.Prefill/Connect")()
    await call.write(b"\xff\xff\xff")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await read(call)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_messages_up_to_the_limit_pass(start: Start) -> None:
    """12 MB reach the handler; the server refuses more than 16 MiB, whatever a client sends."""
    channel = await start(Inference(errors.PromptTooLong("too long")))
    stub = inference_pb2_grpc.InferenceStub(channel)
    call = stub.Generate(inference_pb2.GenerateRequest(text="x" * 12_000_000))
    assert (await read(call)).request_id == "0"
    call.cancel()
    server = RpcServer(SERVICE)
    inference_pb2_grpc.add_InferenceServicer_to_server(Inference(), server.aio)
    port = await server.start("127.0.0.1", 0)
    options = [("grpc.max_send_message_length", 2 * MAX_MESSAGE_BYTES)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as unbounded:
        stub = inference_pb2_grpc.InferenceStub(unbounded)
        call = stub.Generate(inference_pb2.GenerateRequest(text="x" * (MAX_MESSAGE_BYTES + 1)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read(call)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.stop()


async def test_health_follows_set_serving() -> None:
    server = RpcServer(SERVICE)
    port = await server.start("127.0.0.1", 0)
    states = health_pb2.HealthCheckResponse
    async with open_channel(f"127.0.0.1:{port}") as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        for serving, state in ((None, states.NOT_SERVING), (True, states.SERVING)):
            if serving is not None:
                await server.set_serving(serving)
            for service in ("", SERVICE):
                answer = await check(health_pb2.HealthCheckRequest(service=service))
                assert answer.status == state
    await server.stop()


async def test_calls_beyond_the_limit_of_a_connection_wait_at_the_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "_MAX_CONCURRENT_STREAMS", 2)
    server = RpcServer(SERVICE, max_connections=10)
    inference_pb2_grpc.add_InferenceServicer_to_server(Inference(), server.aio)
    port = await server.start("127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        running = [stub.Generate(inference_pb2.GenerateRequest()) for _ in range(2)]
        for call in running:
            await read(call)
        third = stub.ListModels(inference_pb2.ListModelsRequest())
        for _ in range(100):  # messages that the third call could have overtaken
            await read(running[0])
        assert not third.done()
        running[0].cancel()
        assert (await third).models[0].id == "tiny"
    await server.stop()


REFLECTION = "grpc.reflection.{}.ServerReflection"


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
async def test_reflection_tells_of_the_services(start: Start, version: str) -> None:
    """Both versions list the services, and reflection itself; their messages are the same."""
    channel = await start(Inference())
    ask: Any = channel.stream_stream(
        f"/{REFLECTION.format(version)}/ServerReflectionInfo",
        reflection_pb2.ServerReflectionRequest.SerializeToString,
        reflection_pb2.ServerReflectionResponse.FromString,
    )
    call = ask()
    await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
    names = {service.name for service in (await read(call)).list_services_response.service}
    both = {REFLECTION.format("v1"), REFLECTION.format("v1alpha")}
    assert {SERVICE, "quire.v1.Prefill", "grpc.health.v1.Health", *both} <= names
    for name in (SERVICE, *both):
        request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=name)
        await call.write(request)
        (file, *_) = (await read(call)).file_descriptor_response.file_descriptor_proto
        descriptor = descriptor_pb2.FileDescriptorProto.FromString(file)
        assert f"{descriptor.package}.{descriptor.service[0].name}" == name
    call.cancel()


async def test_a_port_in_use_is_a_startup_error() -> None:
    """Two servers never share a port."""
    first, second = RpcServer(SERVICE), RpcServer(SERVICE)
    port = await first.start("127.0.0.1", 0)
    with pytest.raises(errors.StartupError, match=f"cannot listen on 127.0.0.1:{port}"):
        await second.start("127.0.0.1", port)
    await first.stop()
    await second.stop()


async def test_a_server_that_is_not_there_is_unavailable() -> None:
    server = RpcServer(SERVICE)
    port = await server.start("127.0.0.1", 0)
    await server.stop()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        error = await list_models(channel)
    assert type(from_rpc_error(error)) is errors.Unavailable


async def test_a_server_that_is_slow_to_answer_is_waited_for() -> None:
    """On a busy machine a connection takes time."""
    server = RpcServer(SERVICE)
    port = await server.start("127.0.0.1", 0)
    async with Proxy(f"127.0.0.1:{port}") as proxy:
        proxy.delay_s = 0.3
        async with open_channel(proxy.address) as channel:
            check = health_pb2_grpc.HealthStub(channel).Check
            answer = await check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.NOT_SERVING
    await server.stop()


async def test_a_guarded_server_admits_calls_with_a_proof_and_health_checks() -> None:
    server = RpcServer(SERVICE, "quire.v1.Prefill", guard=guard("p-1"))
    inference_pb2_grpc.add_InferenceServicer_to_server(Inference(), server.aio)
    prefill_pb2_grpc.add_PrefillServicer_to_server(Prefill(), server.aio)
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    await server.set_serving(True)
    async with open_channel(address) as channel:
        error = await list_models(channel)
        assert error.code() is grpc.StatusCode.UNAUTHENTICATED
        assert isinstance(from_rpc_error(error), errors.Unauthenticated)
        stream = prefill_pb2_grpc.PrefillStub(channel).Connect()
        assert await stream.code() is grpc.StatusCode.UNAUTHENTICATED
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

        method = f"/{SERVICE}/ListModels"
        proof = Proof(SECRET.rpc_key, method, "p-1")
        call = inference_pb2_grpc.InferenceStub(channel).ListModels(
            inference_pb2.ListModelsRequest(), metadata=proof.metadata
        )
        await call
        proof.check(await call.initial_metadata())
    await server.stop()


async def test_a_local_server_is_for_processes_of_its_user(tmp_path: Path) -> None:
    """It has a port only if one is given."""
    socket = tmp_path / "run" / "a.sock"
    server = RpcServer(SERVICE)
    assert await server.start_local(socket, "127.0.0.1", None) is None
    assert socket.stat().st_mode & 0o077 == socket.parent.stat().st_mode & 0o077 == 0
    async with open_channel(f"unix:{socket}") as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    await server.stop()
    server = RpcServer(SERVICE)
    port = await server.start_local(socket, "127.0.0.1", 0)
    async with open_channel(f"127.0.0.1:{port}") as channel:
        await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    await server.stop()


async def test_a_socket_that_cannot_be_made_stops_the_start(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120)
    with pytest.raises(errors.StartupError, match="cannot listen on the socket"):
        await RpcServer(SERVICE).start_local(path, "127.0.0.1", None)
