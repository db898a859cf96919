"""HTTP over TLS with clients that break off, send other things than TLS, or read slowly."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from quire.certificates import write_certificates
from services.gateway.http.connections import ConnectionLimits
from services.gateway.http.server import http_server
from services.runtime.rpc.tls import TlsFiles

from .raw import LIMIT_S, Connection, connected

PART = b"x" * (1 << 16)
GET = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"


class Application:
    """Sends `num_parts` parts of 64 KiB, and then waits until the client has left."""

    def __init__(self) -> None:
        self.num_parts = 0
        self.num_sent = 0
        self.sent_when_left = 0
        self.left = asyncio.Event()

    async def __call__(self, scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        await receive()
        headers = [(b"content-length", b"%d" % (self.num_parts << 16))]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        if self.num_parts:
            watching = asyncio.create_task(self._watch(receive))
            for _ in range(self.num_parts):
                await send({"type": "http.response.body", "body": PART, "more_body": True})
                self.num_sent += 1
            await watching
        await send({"type": "http.response.body"})

    async def _watch(self, receive) -> None:  # type: ignore[no-untyped-def]
        while (await receive())["type"] != "http.disconnect":
            pass
        self.sent_when_left = self.num_sent
        self.left.set()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    write_certificates(directory)
    return directory


@pytest.fixture
def application() -> Application:
    return Application()


@pytest.fixture
async def port(application: Application, made: Path) -> AsyncIterator[int]:
    tls = TlsFiles(made / "gateway.crt", made / "gateway.key")
    limits = ConnectionLimits(write_timeout_s=0.3)
    async with http_server(application, "127.0.0.1", 0, 1, limits, tls) as port:
        yield port


@asynccontextmanager
async def encrypted(port: int, made: Path) -> AsyncIterator[Connection]:
    context = ssl.create_default_context(cafile=str(made / "ca.crt"))
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, limit=1024)
    try:
        yield Connection(reader, writer)
    finally:
        writer.transport.abort()


async def ask(port: int, made: Path) -> None:
    async with encrypted(port, made) as connection:
        connection.send(GET)
        assert (await connection.answer()).status == 200


async def test_a_client_that_does_not_shake_hands_is_cut_off(made: Path) -> None:
    tls = TlsFiles(made / "gateway.crt", made / "gateway.key")
    limits = ConnectionLimits(header_timeout_s=0.2)
    async with http_server(Application(), "127.0.0.1", 0, 1, limits, tls) as port:
        for sent in (b"", b"\x16"):  # the first byte of a hello
            async with connected(port) as connection:
                connection.send(sent)
                assert await connection.closed() == b""
        await ask(port, made)


async def test_an_answer_that_nobody_reads_waits_and_then_ends(
    port: int, made: Path, application: Application
) -> None:
    """The application sends no more than fits into buffers; a client that never reads is cut
    off."""
    application.num_parts = 1000
    async with encrypted(port, made) as connection, asyncio.timeout(LIMIT_S):
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        connection.send(GET)
        await application.left.wait()
    assert application.sent_when_left < 500  # the kernel's buffers take some
