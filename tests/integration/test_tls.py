"""TLS of gRPC and HTTP servers: which clients may connect, and certificates that change."""

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from quire.async_client import AsyncClient
from quire.certificates import write_certificates
from quire.connections import Tls
from quire.errors import BadTls, Unreachable
from services.gateway.http.server import http_server
from services.runtime.errors import StartupError
from services.runtime.rpc.tls import TlsFiles
from services.runtime.rpc.transport import RpcServer, open_channel

LIMIT_S = 10


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    write_certificates(directory, clients=["alice"])
    return directory


@pytest.fixture(scope="module")
def strange(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificate of another deployment."""
    directory = tmp_path_factory.mktemp("strange")
    write_certificates(directory)
    return directory


def files(directory: Path, name: str, *, ca: Path | None = None) -> TlsFiles:
    return TlsFiles(directory / f"{name}.crt", directory / f"{name}.key", ca)


def of_service(directory: Path) -> TlsFiles:
    return files(directory, "service", ca=directory / "ca.crt")


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


async def listen(stack: AsyncExitStack, tls: TlsFiles) -> str:
    server = RpcServer(tls=tls)
    port = await server.start("127.0.0.1", 0)
    stack.push_async_callback(server.stop)
    await server.set_serving(True)
    return f"127.0.0.1:{port}"


async def asks(channel: aio.Channel) -> grpc.StatusCode:
    async with channel:
        try:
            stub = health_pb2_grpc.HealthStub(channel)
            await stub.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
        except aio.AioRpcError as error:
            return error.code()
        return grpc.StatusCode.OK


async def test_services_accept_services_of_their_own_deployment_only(
    stack: AsyncExitStack, made: Path, strange: Path
) -> None:
    address = await listen(stack, of_service(made))
    assert await asks(open_channel(address, of_service(made))) is grpc.StatusCode.OK
    refused = {
        "another CA": of_service(strange),
        "our CA, but no certificate of ours": replace(of_service(strange), ca=made / "ca.crt"),
    }
    for who, tls in refused.items():
        assert await asks(open_channel(address, tls)) is grpc.StatusCode.UNAVAILABLE, who
    assert await asks(open_channel(address)) is grpc.StatusCode.UNAVAILABLE
    credentials = grpc.ssl_channel_credentials((made / "ca.crt").read_bytes())
    without = aio.secure_channel(
        address, credentials, [("grpc.ssl_target_name_override", "service.quire.internal")]
    )
    assert await asks(without) is grpc.StatusCode.UNAVAILABLE


async def test_a_channel_does_not_take_a_gateways_certificate_for_a_services(
    stack: AsyncExitStack, made: Path
) -> None:
    address = await listen(stack, files(made, "gateway"))
    assert await asks(open_channel(address, of_service(made))) is grpc.StatusCode.UNAVAILABLE


async def test_grpc_reads_changed_certificates_and_keeps_connections(
    stack: AsyncExitStack, tmp_path: Path
) -> None:
    write_certificates(tmp_path)
    address = await listen(stack, files(tmp_path, "gateway"))
    old, running = (tmp_path / "ca.crt").read_bytes(), health_pb2_grpc.HealthStub

    def channel(ca: bytes) -> aio.Channel:
        options = [("grpc.use_local_subchannel_pool", 1)]
        return aio.secure_channel(address, grpc.ssl_channel_credentials(ca), options)

    first = channel(old)
    watch = running(first).Watch(health_pb2.HealthCheckRequest())
    await watch.read()
    for name in ("ca.crt", "ca.key"):
        (tmp_path / name).unlink()
    write_certificates(tmp_path)  # with a new CA
    assert await asks(channel((tmp_path / "ca.crt").read_bytes())) is grpc.StatusCode.OK
    assert await asks(channel(old)) is grpc.StatusCode.UNAVAILABLE
    answer = await running(first).Check(health_pb2.HealthCheckRequest())
    assert answer.status == health_pb2.HealthCheckResponse.SERVING
    (tmp_path / "gateway.crt").write_text("broken")
    assert await asks(channel((tmp_path / "ca.crt").read_bytes())) is grpc.StatusCode.OK
    watch.cancel()
    await first.close()


async def test_clients_tell_an_untrusted_gateway_from_one_that_is_away(
    stack: AsyncExitStack, made: Path, strange: Path
) -> None:
    """A listener in the place of a gateway that is down, such as Docker's proxy, accepts
    connections and closes them. A client that took this for a bad certificate would not resume its
    stream."""
    address = await listen(stack, files(strange, "gateway"))
    proxy = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    stack.callback(proxy.close)
    port = proxy.sockets[0].getsockname()[1]
    tls = Tls(made / "ca.crt")
    async with AsyncClient(f"127.0.0.1:{port}", tls=tls) as away:
        with pytest.raises(Unreachable):
            await away.is_ready()
    async with AsyncClient(address, tls=tls) as untrusted:
        with pytest.raises(BadTls):
            await untrusted.is_ready()


def _expired(directory: Path) -> None:
    write_certificates(directory, days=-0.01)


def _without_key(directory: Path) -> None:
    (directory / "gateway.key").unlink()


def _of_another(directory: Path) -> None:
    (directory / "gateway.key").write_bytes((directory / "service.key").read_bytes())


def _text(directory: Path) -> None:
    (directory / "gateway.crt").write_text("no certificate")


def _no_ca(directory: Path) -> None:
    (directory / "ca.crt").write_text("no CA")


@pytest.mark.parametrize(
    ("corrupt", "problem"),
    [
        (_expired, r"the certificate .*gateway.crt expired at 20"),
        (_without_key, r"cannot read the key .*gateway.key: No such file"),
        (_of_another, r"gateway.key is not the key of the certificate .*gateway.crt"),
        (_text, r"no certificate and key in PEM format: .*gateway.crt"),
        (_no_ca, r"ca.crt has no CA in PEM format"),
    ],
)
def test_unusable_files_are_named_at_the_start(
    tmp_path: Path, corrupt: Callable[[Path], None], problem: str
) -> None:
    write_certificates(tmp_path)
    corrupt(tmp_path)
    with pytest.raises(StartupError, match=problem):
        files(tmp_path, "gateway", ca=tmp_path / "ca.crt").check()


def test_half_a_ca_is_refused_and_a_whole_one_kept(tmp_path: Path) -> None:
    write_certificates(tmp_path)
    before = (tmp_path / "ca.crt").read_bytes()
    assert "ca.crt" not in write_certificates(tmp_path)
    assert (tmp_path / "ca.crt").read_bytes() == before
    assert (tmp_path / "ca.key").stat().st_mode & 0o777 == 0o600
    (tmp_path / "ca.key").unlink()
    with pytest.raises(BadTls, match="both are needed"):
        write_certificates(tmp_path)


# ── HTTP ─────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def app() -> Starlette:
    go_on = asyncio.Event()

    async def whole(request: Request) -> Response:
        return Response(await request.body())

    async def stream(request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"first"
            await go_on.wait()
            yield b" last" * 100_000

        return StreamingResponse(parts())

    app = Starlette(routes=[Route("/", whole, methods=["POST"]), Route("/stream", stream)])
    app.state.go_on = go_on
    return app


def trusting(ca: Path, client: TlsFiles | None = None) -> httpx.AsyncClient:
    context = ssl.create_default_context(cafile=str(ca))
    if client is not None:
        context.load_cert_chain(client.certificate, client.key)
    return httpx.AsyncClient(verify=context, timeout=LIMIT_S, trust_env=False)


async def test_http_reads_changed_certificates_and_keeps_streams(app: Any, tmp_path: Path) -> None:
    write_certificates(tmp_path)
    tls = files(tmp_path, "gateway")
    async with http_server(app, "127.0.0.1", 0, 1.0, None, tls) as port:
        url = f"https://127.0.0.1:{port}"
        async with trusting(tmp_path / "ca.crt") as old:
            assert (await old.post(url, content=b"x" * 3_000_000)).content == b"x" * 3_000_000
            async with old.stream("GET", f"{url}/stream") as answer:
                parts = answer.aiter_bytes()
                assert await anext(parts) == b"first"
                for name in ("ca.crt", "ca.key"):
                    (tmp_path / name).unlink()
                write_certificates(tmp_path)
                async with trusting(tmp_path / "ca.crt") as new:
                    assert (await new.post(url, content=b"new")).content == b"new"
                app.state.go_on.set()
                rest = b"".join([part async for part in parts])
                assert rest == b" last" * 100_000


async def test_http_asks_clients_for_certificates(app: Any, made: Path, strange: Path) -> None:
    tls = files(made, "gateway", ca=made / "ca.crt")
    async with http_server(app, "127.0.0.1", 0, 1.0, None, tls) as port:
        url = f"https://127.0.0.1:{port}"
        async with trusting(made / "ca.crt", files(made, "alice")) as client:
            assert (await client.post(url, content=b"hi")).content == b"hi"
        for wrong in (None, files(strange, "service")):
            async with trusting(made / "ca.crt", wrong) as client:
                with pytest.raises(
                    (httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)
                ):
                    await client.post(url, content=b"hi")


async def test_strict_clients_accept_the_certificates(app: Any, made: Path) -> None:
    """Clients with Python 3.13 or later are strict."""
    context = ssl.create_default_context(cafile=str(made / "ca.crt"))
    context.verify_flags |= ssl.VERIFY_X509_STRICT
    context.load_cert_chain(made / "alice.crt", made / "alice.key")
    tls = files(made, "gateway", ca=made / "ca.crt")
    async with http_server(app, "127.0.0.1", 0, 1.0, None, tls) as port:
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
        writer.close()
        await writer.wait_closed()


async def test_a_client_whose_ca_is_removed_resumes_no_session(app: Any, tmp_path: Path) -> None:
    """A session that is resumed shows no certificate."""
    for name in ("ours", "theirs"):
        (tmp_path / name).mkdir()
        write_certificates(tmp_path / name, clients=["alice"])
    ours, trusted = tmp_path / "ours", tmp_path / "trusted.crt"
    shutil.copy(ours / "ca.crt", trusted)
    context = ssl.create_default_context(cafile=str(ours / "ca.crt"))
    context.load_cert_chain(ours / "alice.crt", ours / "alice.key")

    def ask(port: int, session: ssl.SSLSession | None) -> tuple[bytes, ssl.SSLSession | None]:
        with (
            socket.create_connection(("127.0.0.1", port), LIMIT_S) as plain,
            context.wrap_socket(plain, server_hostname="localhost", session=session) as secured,
        ):
            secured.sendall(b"GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            return secured.recv(12), secured.session

    tls = files(ours, "gateway", ca=trusted)
    async with http_server(app, "127.0.0.1", 0, 1.0, None, tls) as port:
        status, session = await asyncio.to_thread(ask, port, None)
        assert status == b"HTTP/1.1 404"
        shutil.copy(tmp_path / "theirs" / "ca.crt", trusted)
        try:
            status, _ = await asyncio.to_thread(ask, port, session)
        except OSError:
            status = b""
        assert status == b""


async def test_old_versions_of_tls_are_refused(app: Any, made: Path) -> None:
    async with http_server(app, "127.0.0.1", 0, 1.0, None, files(made, "gateway")) as port:
        context = ssl.create_default_context(cafile=str(made / "ca.crt"))
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises(ssl.SSLError):
            await asyncio.open_connection("127.0.0.1", port, ssl=context)
