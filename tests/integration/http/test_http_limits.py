"""A client's connections, time and memory at the server are limited, and do not affect other
clients."""

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from quire.certificates import write_certificates
from services.gateway.http.app import create_app
from services.gateway.http.connections import ConnectionLimits
from services.gateway.http.middleware.body_limits import MAX_BODY_BYTES
from services.gateway.http.server import http_server
from services.runtime.rpc.tls import TlsFiles
from tests.waiting import until

from .conftest import FakeGenerator, soon
from .raw import HEALTH, Connection, connected, post

PROMPT = b'{"prompt": "Hi"}'
MIB = 1024 * 1024


@asynccontextmanager
async def serving(
    generator: FakeGenerator,
    body_memory: int = 256 * MIB,
    body_timeout_s: float = 60.0,
    tls: TlsFiles | None = None,
    **limits: Any,
) -> AsyncIterator[int]:
    """Serves on the port that it yields; `limits`: of ConnectionLimits."""
    app = create_app(
        generator,
        CollectorRegistry(),
        max_body_memory_bytes=body_memory,
        body_timeout_s=body_timeout_s,
    )
    bounds = ConnectionLimits(**limits)
    async with http_server(app, "127.0.0.1", 0, 1, bounds, tls) as port:
        yield port


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("certificates")
    write_certificates(directory)
    return directory


def tls_of(certificates: Path) -> tuple[TlsFiles, ssl.SSLContext]:
    """The files of the server, and what a client needs."""
    files = TlsFiles(certificates / "gateway.crt", certificates / "gateway.key")
    return files, ssl.create_default_context(cafile=str(certificates / "ca.crt"))


async def ask_health(port: int) -> float:
    """Ask for /health on a new connection; returns the time in seconds."""
    began = time.perf_counter()
    async with connected(port) as connection:
        connection.send(HEALTH)
        assert (await connection.answer()).status == 200
    return time.perf_counter() - began


async def flood(connection: Connection, piece: bytes) -> int:
    """Send `piece` until the server closes; returns how often."""
    num_sent = 0
    with suppress(ConnectionError):
        async with soon():
            while True:
                connection.send(piece)
                await connection.writer.drain()
                await asyncio.sleep(0)
                num_sent += 1
    return num_sent


# Latency


async def test_a_kept_connection_answers_without_waiting_for_acknowledgements(port: int) -> None:
    """A small write after another one waits 40 ms where TCP_NODELAY is not set."""
    taken = []
    async with connected(port) as connection:
        for _ in range(20):
            began = time.perf_counter()
            connection.send(post(PROMPT))
            assert (await connection.answer()).status == 200
            taken.append(time.perf_counter() - began)
    assert sorted(taken)[10] < 0.02


async def test_a_flood_of_framing_ends_its_connection(port: int) -> None:
    """Chunks of one byte, endless extensions and endless trailers cost more than they carry."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    pieces = (b"1\r\nx\r\n", b"1;" + b"x" * 1000, b"0\r\n" + b"a: b\r\n" * 1000)
    for piece in pieces:
        async with connected(port) as connection:
            connection.send(head)
            await flood(connection, piece * 1000)
    await ask_health(port)


# Time


@pytest.mark.parametrize(
    ("sent", "num_before"),
    [(HEALTH[:-2], 0), (HEALTH[:-2], 1), (b"\r\n", 0), (b"\r\n", 1), (b"", 0)],
)
async def test_headers_that_do_not_arrive_are_given_up(
    generator: FakeGenerator, sent: bytes, num_before: int
) -> None:
    """Also if nothing at all comes over a new connection."""
    async with serving(generator, header_timeout_s=0.1) as port, connected(port) as connection:
        for _ in range(num_before):
            connection.send(HEALTH)
            await connection.answer()
        connection.send(sent)
        assert await connection.closed() == b""


async def test_a_client_that_does_not_shake_hands_is_cut_off(
    generator: FakeGenerator, certificates: Path
) -> None:
    files, client = tls_of(certificates)
    async with serving(generator, tls=files, header_timeout_s=0.2) as port:
        for sent in (b"", b"\x16"):  # the first byte of a hello
            async with connected(port) as connection:
                connection.send(sent)
                assert await connection.closed() == b""
        async with connected(port, tls=client) as connection:
            connection.send(HEALTH)
            assert (await connection.answer()).status == 200


@pytest.mark.parametrize("headers", ["", "Connection: close\r\n"])
async def test_a_body_that_does_not_arrive_is_given_up(
    generator: FakeGenerator, headers: str
) -> None:
    """It is not logged as an error of the server."""
    with capture_logs() as logs:
        async with serving(generator, body_timeout_s=0.2) as port, connected(port) as connection:
            connection.send(post(PROMPT, headers=headers)[:-1])
            answer = await connection.answer()
            assert (answer.status, answer.error["code"]) == (408, "request_timeout")
            assert answer.error["message"] == "the body did not arrive in 0.2 s"
            assert await connection.closed() == b""
    assert generator.requests == []
    assert [log for log in logs if log["log_level"] == "error"] == []


async def test_headers_that_drip_are_given_up(generator: FakeGenerator) -> None:
    async with serving(generator, header_timeout_s=0.2) as port, connected(port) as connection:
        connection.send(HEALTH[:-2])

        async def drip() -> None:
            while True:
                connection.send(b"A: b\r\n")
                await asyncio.sleep(0.02)

        dripping = asyncio.create_task(drip())
        assert await connection.closed() == b""
        dripping.cancel()


async def test_an_answer_may_take_longer_than_its_request(generator: FakeGenerator) -> None:
    """The limits apply only to the time of the client's own sending."""
    generator.delay_s = 0.2
    async with (
        serving(generator, header_timeout_s=0.05, body_timeout_s=0.05) as port,
        connected(port) as connection,
    ):
        connection.send(post(PROMPT))
        assert (await connection.answer()).status == 200


async def test_leaving_in_the_body_is_no_error(generator: FakeGenerator) -> None:
    with capture_logs() as logs:
        async with serving(generator) as port:
            async with connected(port) as connection:
                connection.send(post(PROMPT, length=1000))
                await ask_health(port)
            await ask_health(port)
    assert logs == []


# Memory


@pytest.mark.parametrize("chunked", [False, True])
async def test_a_too_large_body_is_answered(generator: FakeGenerator, chunked: bool) -> None:
    """Although the client still sends when the answer comes. Then its connection closes."""
    length = MAX_BODY_BYTES + MIB
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    if chunked:
        head += b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % length
    else:
        head += b"Content-Length: %d\r\n\r\n" % length
    async with serving(generator) as port, connected(port) as connection:
        connection.send(head + b"x" * length + chunked * b"\r\n0\r\n\r\n")
        answer = await connection.answer()
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        assert answer.headers["connection"] == "close"
        assert await connection.closed() == b""


async def test_an_endless_body_closes_the_connection(generator: FakeGenerator) -> None:
    """Soon, after a bounded part of it."""
    async with serving(generator) as port, connected(port) as connection:
        connection.send(post(b"", length=8 * 1024 * MIB))
        assert await flood(connection, b"x" * MIB) < 100


async def test_bodies_take_a_bounded_amount_of_memory(generator: FakeGenerator) -> None:
    """While unfinished bodies use all of the memory, large ones are refused with a delay, and small
    ones go on; when the unfinished ones are gone, all go on."""
    large = json.dumps({"prompt": "x" * MIB}).encode()
    unfinished = post(b" " * MIB, length=MAX_BODY_BYTES)
    async with serving(generator, body_memory=4 * MIB) as port:
        async with AsyncExitStack() as stack:
            for _ in range(2):
                connection = await stack.enter_async_context(connected(port))
                connection.send(unfinished)
                await connection.writer.drain()
            async with connected(port) as connection:
                connection.send(post(large))
                assert (await connection.answer()).status == 200
            connection = await stack.enter_async_context(connected(port))
            connection.send(unfinished)
            await connection.writer.drain()
            await ask_health(port)
            async with connected(port) as connection:
                connection.send(post(large))
                answer = await connection.answer()
            assert (answer.status, answer.error["code"]) == (429, "overloaded")
            assert answer.headers["retry-after"] == "1"
            async with connected(port) as connection:
                connection.send(post(PROMPT))
                assert (await connection.answer()).status == 200
        async with connected(port) as connection:
            for _ in range(8):
                connection.send(post(large))
                assert (await connection.answer()).status == 200


# Connections


async def test_idle_connections_do_not_keep_clients_out(generator: FakeGenerator) -> None:
    """At the limit, a new connection replaces the one that was idle longest."""
    async with serving(generator, max_connections=4) as port, AsyncExitStack() as stack:
        opened = [await stack.enter_async_context(connected(port)) for _ in range(4)]
        opened[0].send(HEALTH)
        await opened[0].answer()
        for _ in range(2):
            await ask_health(port)
        assert await opened[1].closed() == b""
        opened[0].send(HEALTH)
        assert (await opened[0].answer()).status == 200


async def test_too_many_busy_connections_are_refused(generator: FakeGenerator) -> None:
    """When one of the others has its answer, there is room again."""
    generator.pause_at = 1
    async with serving(generator, max_connections=2) as port:
        async with connected(port) as one, connected(port) as two:
            for connection in (one, two):
                connection.send(post(PROMPT))
            await until(lambda: generator.num_running == 2)
            for _ in range(5):
                async with connected(port) as refused:
                    refused.send(HEALTH)
                    answer = await refused.answer()
                    assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                    assert answer.error["code"] == "unavailable"
                    assert await refused.closed() == b""
        await until(lambda: generator.num_running == 0)
        await ask_health(port)


@pytest.mark.parametrize("is_encrypted", [False, True])
async def test_a_stream_that_nobody_reads_ends(
    generator: FakeGenerator, certificates: Path, is_encrypted: bool
) -> None:
    """Its generator and its connection are closed, although the client stays."""
    generator.is_endless = True
    files, client = tls_of(certificates) if is_encrypted else (None, None)
    async with (
        serving(generator, tls=files, write_timeout_s=0.2) as port,
        connected(port, receive_bytes=4096, tls=client) as connection,
        soon(),
    ):
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        connection.send(post(b'{"prompt": "Hi", "stream": true}'))
        await generator.closed.wait()
    assert generator.num_deltas < 4000
