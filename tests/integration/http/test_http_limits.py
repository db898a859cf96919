"""A client's connections, time and memory at the server are limited, and do not affect other
clients."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from select import select
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from services.gateway.frontend.http.app import create_app
from services.gateway.frontend.http.middleware.body_limits import MAX_BODY_BYTES
from services.gateway.frontend.http.transport import open_connections
from services.gateway.frontend.http.transport.open_connections import ConnectionLimits
from services.gateway.frontend.http.transport.server import http_server
from tests.waiting import until

from .conftest import FakeGenerator, soon
from .raw import HEALTH, Connection, connected, post

PROMPT = b'{"prompt": "Hi"}'
MIB = 1024 * 1024


@asynccontextmanager
async def serving(
    generator: FakeGenerator, body_memory: int = 256 * MIB, **limits: Any
) -> AsyncIterator[int]:
    """Serves on the port that it yields; `limits`: of ConnectionLimits."""
    app = create_app(generator, CollectorRegistry(), max_body_memory_bytes=body_memory)
    bounds = ConnectionLimits(**limits)
    async with http_server(app, "127.0.0.1", 0, grace_s=1, limits=bounds) as port:
        yield port


async def ask_health(port: int) -> float:
    """Ask for /health on a new connection; returns the time in seconds."""
    began = time.perf_counter()
    async with connected(port) as connection:
        connection.send(HEALTH)
        assert (await connection.answer()).status == 200
    return time.perf_counter() - began


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


async def test_tiny_chunks_do_not_delay_a_neighbour(port: int) -> None:
    """While as many chunks as the server takes arrive over twenty connections, other requests are
    answered soon."""
    chunks = b"1\r\nx\r\n" * 50_000

    async def flood(connection: Connection) -> None:
        connection.send(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n")
        connection.send(b"Transfer-Encoding: chunked\r\n\r\n")
        while True:
            connection.send(chunks)
            await connection.writer.drain()

    async with asyncio.TaskGroup() as tasks, soon(), AsyncExitStack() as stack:
        floods = [
            tasks.create_task(flood(await stack.enter_async_context(connected(port))))
            for _ in range(20)
        ]
        await asyncio.sleep(0)
        taken = [await ask_health(port) for _ in range(20)]
        for task in floods:
            task.cancel()
    assert max(taken) < 0.5


# Time


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (HEALTH[:-2], "the headers did not arrive in 0.1 s"),
        (b"\r\n", "the headers did not arrive in 0.1 s"),
        (post(PROMPT)[:-1], "the body did not arrive in 0.2 s"),
        (post(PROMPT, headers="Connection: close\r\n")[:-1], "the body did not arrive in 0.2 s"),
    ],
)
async def test_a_request_that_does_not_arrive_is_given_up(
    generator: FakeGenerator, sent: bytes, text: str
) -> None:
    """Also on a kept connection. It is not logged as an error of the server."""
    with capture_logs() as logs:
        async with serving(generator, header_timeout_s=0.1, body_timeout_s=0.2) as port:
            for num_before in (0, 1):
                async with connected(port) as connection:
                    for _ in range(num_before):
                        connection.send(HEALTH)
                        await connection.answer()
                    connection.send(sent)
                    answer = await connection.answer()
                    assert (answer.status, answer.error["code"]) == (408, "request_timeout")
                    assert answer.error["message"] == text
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
        assert (await connection.answer()).status == 408
        dripping.cancel()


async def test_a_connection_without_a_request_is_closed(generator: FakeGenerator) -> None:
    async with serving(generator, header_timeout_s=0.1) as port, connected(port) as connection:
        assert await connection.closed() == b""


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
async def test_a_too_large_body_closes_the_connection(
    generator: FakeGenerator, chunked: bool
) -> None:
    """It closes soon, after a bounded part of the client's further bytes."""
    length = 8 * 1024 * MIB
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    if chunked:
        head += b"Transfer-Encoding: chunked\r\n\r\n%x\r\n" % length
    else:
        head += b"Content-Length: %d\r\n\r\n" % length
    num_sent = 0

    async def flood(connection: Connection) -> None:
        nonlocal num_sent
        connection.send(head)
        while True:
            connection.send(b"x" * MIB)
            await connection.writer.drain()
            num_sent += MIB

    async with serving(generator) as port, connected(port) as connection:
        flooding = asyncio.create_task(flood(connection))
        answer = await connection.answer()
        assert (answer.status, answer.error["code"]) == (413, "request_too_large")
        assert answer.headers["connection"] == "close"
        async with soon():
            await asyncio.wait([flooding])
        assert isinstance(flooding.exception(), ConnectionError)
    assert num_sent < 100 * MIB


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


async def test_a_slow_reader_keeps_its_answer_while_others_are_idle(
    generator: FakeGenerator,
) -> None:
    """Its request is answered, and the connection idle, before the client has read the answer."""
    path = b"x" * 60_000
    async with serving(generator, max_connections=2) as port, AsyncExitStack() as stack:
        slow = await stack.enter_async_context(connected(port, receive_bytes=4096))
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        slow.send(b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
        await until(lambda: select([slow.writer.get_extra_info("socket")], (), (), 0)[0])
        idle = await stack.enter_async_context(connected(port))
        idle.send(HEALTH)
        assert (await idle.answer()).status == 200
        await ask_health(port)
        assert await idle.closed() == b""
        slow.writer.transport.resume_reading()  # type: ignore[attr-defined]
        answer = await slow.answer()
        assert answer.error["message"] == f"there is no /{path.decode()}"
        slow.writer.transport.pause_reading()  # type: ignore[attr-defined]
        slow.send(b"GET /%b HTTP/1.1\r\nHost: x\r\n\r\n" % path)
        for _ in range(2):  # if there is no other one, it gives way
            other = await stack.enter_async_context(connected(port))
            other.send(post(PROMPT))
            assert (await other.answer()).status == 200


async def test_too_many_busy_connections_are_refused(
    generator: FakeGenerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is clear, and the log has one line for all. When one of the others has its
    answer, there is room again."""
    monkeypatch.setattr(open_connections, "_LOG_EVERY_S", 0.1)
    generator.pause_at = 1
    with capture_logs() as logs:
        async with serving(generator, max_connections=2) as port:
            async with connected(port) as one, connected(port) as two:
                for connection in (one, two):
                    connection.send(post(PROMPT))
                await generator.paused.wait()
                for _ in range(5):
                    async with connected(port) as refused:
                        answer = await refused.answer()
                        assert (answer.status, answer.headers["retry-after"]) == (503, "1")
                        assert answer.error["code"] == "unavailable"
                        assert await refused.closed() == b""
            await until(lambda: logs)
            await ask_health(port)
    (line,) = logs
    assert line["event"] == "http_connections_at_limit"
    assert (line["num_refused"], line["num_evicted"], line["max_connections"]) == (5, 0, 2)


async def test_a_stream_that_nobody_reads_ends(generator: FakeGenerator) -> None:
    """Its generator and its connection are closed, although the client stays."""
    generator.is_endless = True
    async with (
        serving(generator, write_timeout_s=0.2) as port,
        connected(port, receive_bytes=4096) as connection,
        soon(),
    ):
        connection.writer.transport.pause_reading()  # type: ignore[attr-defined]
        connection.send(post(b'{"prompt": "Hi", "stream": true}'))
        await generator.closed.wait()
    assert generator.num_deltas < 4000
