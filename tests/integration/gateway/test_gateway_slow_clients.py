"""A client that does not read holds no slot, and loses nothing if it reads again in time."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.gateway.http.app import create_app
from services.gateway.http.connections import ConnectionLimits
from services.gateway.http.server import http_server
from services.gateway.output import output
from services.gateway.output.delta import Delta
from services.runtime.errors import Overloaded
from tests.waiting import until

from .conftest import PROMPT, Call, GatewayHarness, asked, read
from .fakes import FakeDecode, FakePrefill, expected

NUM_TOKENS = 100


@pytest.fixture
def decode(monkeypatch: pytest.MonkeyPatch) -> FakeDecode:
    """One slot; a client may leave 20 tokens unread, and the worker waits for a command at 40."""
    monkeypatch.setattr(output, "PAUSE_UNREAD_TOKENS", 20)
    worker = FakeDecode(num_slots=1)
    worker.pause_after = 40
    return worker


async def stalled(harness: GatewayHarness, decode: FakeDecode) -> AsyncGenerator[Delta, None]:
    """A request at rest, since its client has read only the first delta."""
    deltas = read(harness.gateway, asked(max_tokens=NUM_TOKENS))
    assert (await anext(deltas)).token_ids == tuple(expected(PROMPT, 1))
    await until(lambda: bool(decode.at_rest))
    decode.pause_after = None
    return deltas


async def test_an_unread_request_pauses_and_goes_on(make_harness: Any, decode: FakeDecode) -> None:
    """Meanwhile another request has its slot. Every token comes, and none is computed twice."""
    prefill = FakePrefill()
    harness = await make_harness(prefill, decode)
    async with aclosing(await stalled(harness, decode)) as deltas:
        await Call(harness.gateway, asked("r2")).result()
        assert not decode.running
        tokens = [token async for delta in deltas for token in delta.token_ids]
    assert tokens == expected(PROMPT, NUM_TOKENS)[1:]
    assert [ticket.request_id for ticket in prefill.submitted] == ["r1", "r2"]


async def test_a_client_that_never_reads_on_is_cancelled(
    make_harness: Any, decode: FakeDecode
) -> None:
    harness = await make_harness(FakePrefill(), decode, read_window_s=0.05)
    async with aclosing(await stalled(harness, decode)) as deltas:
        await until(lambda: bool(decode.aborted))
        with pytest.raises(Overloaded, match="too slowly"):
            await anext(deltas)
    assert harness.assembly.dispatcher.num_running == 0


async def test_a_client_that_leaves_during_a_pause_leaves_nothing(
    make_harness: Any, decode: FakeDecode
) -> None:
    harness = await make_harness(FakePrefill(), decode)
    await (await stalled(harness, decode)).aclose()
    await until(lambda: bool(decode.aborted))
    assert harness.assembly.dispatcher.num_running == 0


async def test_a_paused_request_may_lose_its_blocks(make_harness: Any, decode: FakeDecode) -> None:
    """Its ticket is taken back: it is computed again once its client reads, and not before."""
    prefill = FakePrefill()
    harness = await make_harness(prefill, decode)
    deltas = await stalled(harness, decode)
    decode.take_back("r1")
    await Call(harness.gateway, asked("r2")).result()
    assert len(prefill.submitted) == 2
    tokens = [token async for delta in deltas for token in delta.token_ids]
    assert tokens == expected(PROMPT, NUM_TOKENS)[1:]
    assert [ticket.request_id for ticket in prefill.submitted] == ["r1", "r2", "r1"]


async def test_a_client_that_reads_nothing_for_a_while_is_paused(
    make_harness: Any, decode: FakeDecode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with few unread tokens: a slow decode would otherwise keep the slot for minutes. The
    request goes on when its client reads."""
    monkeypatch.setattr(output, "PAUSE_UNREAD_TOKENS", 1_000_000)
    monkeypatch.setattr(output, "PAUSE_AFTER_S", 0.0)
    harness = await make_harness(FakePrefill(), decode)
    async with aclosing(await stalled(harness, decode)) as deltas:
        await Call(harness.gateway, asked("r2")).result()
        assert not decode.running
        tokens = [token async for delta in deltas for token in delta.token_ids]
    assert tokens == expected(PROMPT, NUM_TOKENS)[1:]


async def test_clients_of_http_that_never_read_keep_no_slot(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if neither the kernel's buffers nor a slow decode shows it soon, their requests are
    cancelled, and then their connections closed."""
    monkeypatch.setattr(output, "PAUSE_AFTER_S", 0.1)
    max_tokens, num_clients = 4000, 4
    decode = FakeDecode(num_slots=num_clients)
    decode.pause_after = 1
    harness = await make_harness(FakePrefill(), decode, read_window_s=0.1)
    app = create_app(harness.gateway, CollectorRegistry())
    limits = ConnectionLimits(write_timeout_s=0.3)
    http = http_server(app, "127.0.0.1", 0, grace_s=0, limits=limits)
    port = await harness.stack.enter_async_context(http)
    body = {"prompt": list(PROMPT), "max_tokens": max_tokens, "stream": True, "logprobs": 5}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(content)}\r\n\r\n"
    num_before = num_connections(port)
    clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(num_clients)]
    for client in clients:
        client.sendall(head.encode() + content)
    await until(lambda: len(decode.running) == num_clients)
    num_tokens = 1
    while decode.running and num_tokens < max_tokens:
        num_tokens += 1
        decode.go_on(pause_after=num_tokens)
        await asyncio.sleep(0.001)
    assert num_tokens < max_tokens
    await until(lambda: harness.assembly.dispatcher.num_running == 0)
    assert not decode.slots
    await until(lambda: num_connections(port) == num_before)
    for client in clients:
        client.close()


def num_connections(port: int) -> int:
    """The server's connections that the kernel has."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") for row in rows)
