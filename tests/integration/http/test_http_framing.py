"""The begin and end of requests, byte by byte: a request that two parsers could read in two ways is
refused."""

import asyncio
import random
from typing import Any

import pytest
from structlog.testing import capture_logs

from .conftest import FakeGenerator
from .raw import HEALTH, connected, post

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
PROMPT = b'{"prompt": "Hi"}'
JAVA = post(PROMPT, headers="Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\n")
"""Java's client offers HTTP/2 with each request."""


@pytest.mark.parametrize(
    "request_bytes",
    [
        pytest.param(HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n", id="cl-te"),
        pytest.param(HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n", id="te-cl"),
        pytest.param(HEAD + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n", id="two lengths"),
        pytest.param(HEAD + b"Content-Length: +5\r\n\r\n", id="signed length"),
        pytest.param(HEAD + b"Content-Length: 5, 5\r\n\r\n", id="list of lengths"),
        pytest.param(HEAD + b"Content-Length : 5\r\n\r\n", id="space before colon"),
        pytest.param(b"GET /health HTTP/1.1\nHost: x\n\n", id="bare LF"),
        pytest.param(b"GET /health HTTP/1.1\r\nHost: x\nA: b\r\n\r\n", id="bare LF in headers"),
        pytest.param(b"GET /health HTTP/1.1\r\nHost: x\rA: b\r\n\r\n", id="bare CR in headers"),
        pytest.param(b"GET /health HTTP/1.1\r\nHost: x\r\nA: b\r\n c\r\n\r\n", id="obs-fold"),
        pytest.param(b"GET /health HTTP/1.1\r\nHost: x\r\n\tA: b\r\n\r\n", id="leading fold"),
        pytest.param(b"GET /health HTTP/1.1\r\nHost: a\0b\r\n\r\n", id="NUL"),
        pytest.param(CHUNKED + b"1\na\r\n0\r\n\r\n", id="bare LF after chunk size"),
        pytest.param(CHUNKED + b"1\r\na\n0\r\n\r\n", id="bare LF after chunk"),
        pytest.param(CHUNKED + b"0x1\r\na\r\n0\r\n\r\n", id="chunk size with 0x"),
        pytest.param(CHUNKED + b"fffffffffffffffff\r\n", id="huge chunk size"),
        pytest.param(b"\x16\x03\x01\x02\x00\x01\x00", id="TLS"),
        pytest.param(b"hello\r\n\r\n", id="no HTTP"),
    ],
)
async def test_ambiguous_requests_are_refused(
    port: int, generator: FakeGenerator, request_bytes: bytes
) -> None:
    """The connection closes: the following bytes are not read as a request."""
    async with connected(port) as connection:
        connection.send(request_bytes)
        answer = await connection.answer()
        connection.send(HEALTH)
        assert await connection.closed() == b""
    assert answer.status == 400
    assert answer.headers["connection"] == "close"
    assert generator.requests == []


@pytest.mark.parametrize("num_before", [0, 1])
@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_headers_have_64_kib(port: int, num_before: int, version: bytes) -> None:
    head = b"GET /health HTTP/" + version + b"\r\nHost: x\r\nA: "
    for size, status in ((63 * 1024, 200), (65 * 1024, 431), (79 * 1024, 431)):
        async with connected(port) as connection:
            for _ in range(num_before):
                connection.send(HEALTH)
                assert (await connection.answer()).status == 200
            connection.send(head + b"b" * (size - len(head) - 4) + b"\r\n\r\n")
            assert (await connection.answer()).status == status


@pytest.mark.parametrize("first", [HEALTH, post(PROMPT)])
async def test_pipelined_requests_are_refused(
    port: int, generator: FakeGenerator, first: bytes
) -> None:
    """Those that come together with an answer, and one that comes later with the connection's
    end."""
    async with connected(port) as connection:
        connection.send(first + HEALTH * 10_000)
        answer = await connection.answer()
        assert (answer.status, answer.headers["connection"]) == (400, "close")
        assert "one request after another" in answer.error["message"]
        assert await connection.closed() == b""
    assert generator.requests == []
    generator.pause_at = 1
    async with connected(port) as connection:
        connection.send(post(PROMPT))
        await generator.paused.wait()
        connection.send(HEALTH)
        await generator.closed.wait()
        assert await connection.closed() == b""


async def test_garbage_leaves_the_server_as_it_was(port: int) -> None:
    """Requests with random mistakes, in random pieces, some from clients that reset the connection:
    nothing fails, and the next request is answered."""
    problems = caught_by_loop()
    chance = random.Random(14)
    requests = [
        *(HEALTH, post(PROMPT), CHUNKED + b"5;a=b\r\nhello\r\n0\r\nA: b\r\n\r\n"),
        *(post(b"", length=2**40), JAVA),
        *(b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n", b"GET http://[ HTTP/1.1\r\nHost: x\r\n\r\n"),
    ]
    mistakes = [
        *(b"\r\n", b"\n", b"\0", b" ", b":", b"\xff", b"A" * 5000, b"Host: y\r\n", b"ffff\r\n"),
        *(b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n"),
    ]
    with capture_logs() as logs:
        for _ in range(300):
            sent = b"".join(chance.choices(requests, k=chance.choice((1, 3, 60))))
            for _ in range(chance.randrange(4)):
                at = chance.randrange(len(sent))
                sent = sent[:at] + chance.choice(mistakes) + sent[at + chance.randrange(4) :]
            async with connected(port) as connection:
                middle = chance.randrange(len(sent))
                connection.send(sent[:middle])
                await asyncio.sleep(0)
                connection.send(sent[middle:])
                if chance.random() < 0.5:
                    connection.reset_on_close()
                await asyncio.sleep(0)
        async with connected(port) as connection:
            connection.send(HEALTH)
            assert (await connection.answer()).status == 200
    assert (problems, logs) == ([], [])


def caught_by_loop() -> list[dict[str, Any]]:
    """The exceptions of callbacks and tasks from now on."""
    problems: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: problems.append(context))
    return problems
