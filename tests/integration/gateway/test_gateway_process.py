"""The gateway as a process, with a real Valkey and fake workers."""

import asyncio
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from blockstore.redis_registry import RedisRegistry
from blockstore.redis_store import RedisStore
from quire import AsyncClient, QuireError, Tls
from quire.certificates import write_certificates
from quire.sockets import living_sockets, operations_socket, socket_of
from quire.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from quire.v1.block_manager_pb2 import ListWorkersRequest
from quire.v1.block_manager_pb2_grpc import BlockManagerStub
from services.runtime.rpc.transport import open_channel
from tests.secret import SECRET
from tests.waiting import until

from .conftest import LIMIT_S, PROMPT, SPEC
from .fakes import FakeDecode, FakePrefill, expected, member, start

SERVING = health_pb2.HealthCheckResponse.SERVING
ALL_SERVICES = {
    f"quire.v1.{name}" for name in ("Adapters", "BlockManager", "Inference", "Supervisor")
}
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class GatewayProcess:
    """`python -m services.gateway`, with clients of its gRPC and HTTP ports."""

    def __init__(
        self, process: asyncio.subprocess.Process, channel: aio.Channel, port: int, http_port: int
    ) -> None:
        self.address = f"127.0.0.1:{port}"
        self.process = process
        self.port, self.http_port = port, http_port
        self.inference = inference_pb2_grpc.InferenceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)
        url = f"http://127.0.0.1:{http_port}"
        self.http = httpx.AsyncClient(base_url=url, timeout=LIMIT_S)

    async def until_health(self, state: Any) -> None:
        async with asyncio.timeout(LIMIT_S):
            async for answer in self.health.Watch(health_pb2.HealthCheckRequest()):
                if answer.status == state:
                    return

    def generate(self, request_id: str, max_tokens: int) -> Any:
        request = inference_pb2.GenerateRequest(
            request_id=request_id,
            token_ids=inference_pb2.TokenIds(ids=PROMPT),
            sampling=sampling_pb2.SamplingParams(max_tokens=max_tokens),
        )
        return self.inference.Generate(request)

    async def ended(self) -> int:
        async with asyncio.timeout(LIMIT_S):
            return await self.process.wait()


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def free_port() -> int:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port: int = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return port


async def launch(
    stack: AsyncExitStack,
    redis_url: str,
    run_dir: Path,
    options: Mapping[str, Any] | None = None,
    waits: bool = True,
    **more: str,
) -> GatewayProcess:
    """`options`: of the process; `more`: settings. `waits`: until it listens, without TLS."""
    port, http_port = await free_port(), await free_port()
    settings = {
        "REDIS_URL": redis_url,
        "RUN_DIR": str(run_dir),
        "SECRET": SECRET.root.decode(),
        "PORT": str(port),
        "HTTP_PORT": str(http_port),
        "STOP_GRACE_S": "5.2",
        "PATIENCE_S": "1",
        **more,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "services.gateway",
        env={f"QUIRE_GATEWAY_{name}": value for name, value in settings.items()},
        **(options or {}),
    )
    stack.push_async_callback(_kill, process)
    address = f"127.0.0.1:{port}"
    channel = open_channel(address)
    stack.push_async_callback(channel.close)
    gateway = GatewayProcess(process, channel, port, http_port)
    stack.push_async_callback(gateway.http.aclose)
    if waits:
        async with asyncio.timeout(LIMIT_S):
            await channel.channel_ready()
            await until(lambda: gateway.http.get("/health"), not_yet=(httpx.ConnectError,))
    return gateway


async def to_the_end(call: Any) -> None:
    async with asyncio.timeout(LIMIT_S):
        while await call.read() is not aio.EOF:
            pass


async def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


async def join(
    stack: AsyncExitStack, redis_url: str, model_dir: Path, *workers: FakePrefill | FakeDecode
) -> Callable[[], Awaitable[None]]:
    """Enter the pool and workers into the store and the registry, as real workers do; the result
    announces the workers again."""
    store = await RedisStore.connect(redis_url)
    stack.push_async_callback(store.close)
    await store.register_pool(SPEC)
    registry = await RedisRegistry.connect(redis_url, SECRET.registry_key)
    stack.push_async_callback(registry.close)
    members = []
    for worker in workers:
        server, address = await start(worker)
        stack.push_async_callback(server.stop)
        members.append(member(worker, address, str(model_dir)))

    async def announce() -> None:
        for each in members:
            await registry.announce(each, ttl_s=60)

    await announce()
    return announce


async def test_grpc_and_http_serve_once_there_are_workers(
    stack: AsyncExitStack, valkey: Any, model_dir: Path, short_path: Path
) -> None:
    gateway = await launch(stack, valkey.url, short_path)
    await gateway.until_health(NOT_SERVING)
    assert (await gateway.http.get("/health")).status_code == 503

    await join(stack, valkey.url, model_dir, FakePrefill(), FakeDecode())
    await gateway.until_health(SERVING)
    tokens = [t async for r in gateway.generate("r1", 8) for d in r.deltas for t in d.token_ids]
    assert tokens == expected(PROMPT, 8)
    answer = await gateway.http.post(
        "/v1/completions", json={"model": "toy", "prompt": list(PROMPT), "max_tokens": 8}
    )
    assert answer.json()["choices"][0]["text"] == bytes(tokens).decode()
    assert "quire:generation_tokens_total" in (await gateway.http.get("/metrics")).text

    registry = await RedisRegistry.connect(valkey.url, SECRET.registry_key)
    stack.push_async_callback(registry.close)

    async def states() -> list[str]:
        return [entry.state for entry in await registry.members() if entry.role == "gateway"]

    await until(states, lambda now: now == ["serving"])
    gateway.process.send_signal(signal.SIGTERM)
    assert await gateway.ended() == 0
    assert await states() == []


async def test_stopped_it_gives_what_runs_its_grace_and_then_says_so(
    stack: AsyncExitStack, valkey: Any, model_dir: Path, short_path: Path
) -> None:
    decode = FakeDecode()
    decode.pause_after = 2
    gateway = await launch(stack, valkey.url, short_path)
    await join(stack, valkey.url, model_dir, FakePrefill(), decode)
    await gateway.until_health(SERVING)
    call = gateway.generate("r1", 8)
    await call.read()
    gateway.process.send_signal(signal.SIGTERM)
    await until(lambda: gateway.http.get("/health"), lambda health: health.status_code != 200)
    refused = await gateway.http.post("/v1/completions", json={"prompt": "Hi"})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["code"] == "draining"
    with pytest.raises(aio.AioRpcError) as error:
        await to_the_end(call)
    assert error.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "stopping" in (error.value.details() or "")
    await until(lambda: decode.aborted == [("r1", 1)] or not decode.running)
    assert await gateway.ended() == 0


async def test_a_lost_store_costs_no_request(
    stack: AsyncExitStack, own_valkey: Any, model_dir: Path, short_path: Path
) -> None:
    """Running requests go on, and new ones wait while Redis is away."""
    decode = FakeDecode()
    decode.pause_after = 2
    gateway = await launch(stack, own_valkey.url, short_path)
    announce = await join(stack, own_valkey.url, model_dir, FakePrefill(), decode)
    await gateway.until_health(SERVING)
    running = gateway.generate("r1", 8)
    await running.read()
    own_valkey.kill()
    comes_now = gateway.generate("r2", 8)
    decode.go_on(pause_after=8)
    await to_the_end(running)
    assert not comes_now.done()
    own_valkey.start()
    await announce()
    await to_the_end(comes_now)
    assert (await running.code(), await comes_now.code()) == (grpc.StatusCode.OK,) * 2


async def test_clients_show_certificates_where_a_ca_is_given(
    stack: AsyncExitStack, valkey: Any, short_path: Path, tmp_path: Path
) -> None:
    """Over gRPC and over HTTP."""
    write_certificates(tmp_path, hosts=["127.0.0.1"], clients=["client"])
    files = {"CERT": "gateway.crt", "KEY": "gateway.key"}
    settings: dict[str, Any] = {
        f"PUBLIC_TLS_{name}": str(tmp_path / file) for name, file in files.items()
    }
    settings["PUBLIC_CLIENT_CA"] = str(tmp_path / "ca.crt")
    gateway = await launch(stack, valkey.url, short_path, None, waits=False, **settings)
    shown = Tls(tmp_path / "ca.crt", tmp_path / "client.crt", tmp_path / "client.key")
    async with AsyncClient(gateway.address, tls=shown) as client:
        assert not await until(client.is_ready, lambda _: True, not_yet=(QuireError,))
    async with AsyncClient(gateway.address, tls=Tls(tmp_path / "ca.crt")) as client:
        with pytest.raises(QuireError):
            await client.is_ready()
    url = f"https://127.0.0.1:{gateway.http_port}/health"
    for tls, status in ((shown, 503), (Tls(tmp_path / "ca.crt"), None)):
        async with httpx.AsyncClient(verify=tls.context(), timeout=LIMIT_S) as http:
            if status is None:
                with pytest.raises(httpx.TransportError):
                    await http.get(url)
            else:
                assert (await http.get(url)).status_code == status


async def test_operations_are_served_at_the_operations_address_only(
    stack: AsyncExitStack, valkey: Any, short_path: Path
) -> None:
    """There is no block manager: the operations' relay says so, and the public port has no such
    service."""
    port = await free_port()
    gateway = await launch(stack, valkey.url, short_path, OPERATIONS_PORT=str(port))
    (path,) = await until(lambda: living_sockets(short_path), bool)  # the last that listens
    answers = {}
    for address in (gateway.address, f"unix:{path}", f"127.0.0.1:{port}"):
        async with open_channel(address) as channel:
            with pytest.raises(aio.AioRpcError) as error:
                await BlockManagerStub(channel).ListWorkers(ListWorkersRequest())
            answers[address] = error.value.code(), await services_at(channel)
    assert list(answers.values()) == [
        (grpc.StatusCode.UNIMPLEMENTED, {"quire.v1.Inference"}),
        (grpc.StatusCode.UNAVAILABLE, ALL_SERVICES),
        (grpc.StatusCode.UNAVAILABLE, ALL_SERVICES),
    ]


async def test_a_gateway_that_starts_beside_another_one_leaves_it_its_socket(
    stack: AsyncExitStack, valkey: Any, short_path: Path
) -> None:
    """As in an upgrade: if the new one never serves, operations go on at the other one."""
    port = await free_port()
    usual = operations_socket(short_path, socket.gethostname(), port)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(usual))
        listener.listen(1000)  # nobody accepts the connections by which sockets are found
        gateway = await launch(stack, valkey.url, short_path, waits=False, PORT=str(port))
        await until(lambda: socket_of(short_path, gateway.process.pid), bool)
        assert socket_of(short_path, os.getpid()) == usual


async def services_at(channel: aio.Channel) -> set[str]:
    """Quire's services, by reflection."""
    stub = ServerReflectionStub(channel)
    stream = stub.ServerReflectionInfo()
    await stream.write(ServerReflectionRequest(list_services=""))
    answer = await stream.read()
    stream.cancel()
    names = {service.name for service in answer.list_services_response.service}
    return {name for name in names if name.startswith("quire.")}


async def test_idle_connections_leave_grpc_and_http_open(
    stack: AsyncExitStack, valkey: Any, model_dir: Path, short_path: Path
) -> None:
    """There are more connections than the process may have open files. HTTP serves them, gRPC
    closes silent ones, and the log has a few lines at most."""
    num_connections = 300
    log = short_path / "log"

    def limit_open_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))

    with log.open("w") as stderr:
        gateway = await launch(
            stack,
            valkey.url,
            short_path / "run",
            {"preexec_fn": limit_open_files, "stderr": stderr},
        )
    await join(stack, valkey.url, model_dir, FakePrefill(), FakeDecode())
    await gateway.until_health(SERVING)
    for port in (gateway.http_port, gateway.port):
        idle = [await open_idle(stack, port) for _ in range(num_connections)]
        async with httpx.AsyncClient(base_url=gateway.http.base_url, timeout=LIMIT_S) as another:
            assert (await another.get("/health")).status_code == 200
        tokens = [t async for r in gateway.generate("r1", 8) for d in r.deltas for t in d.token_ids]
        assert tokens == expected(PROMPT, 8)
        channel = open_channel(f"127.0.0.1:{gateway.port}")
        async with channel, asyncio.timeout(LIMIT_S):
            await channel.channel_ready()
        for writer in idle:
            writer.transport.abort()
    assert len(log.read_text().splitlines()) < 20


async def open_idle(stack: AsyncExitStack, port: int) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    stack.callback(writer.transport.abort)
    return writer
