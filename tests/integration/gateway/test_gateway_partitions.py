"""Connections that are slow, cut or half-open: no token is lost, and no client waits without
end."""

import asyncio
from typing import Any

import pytest

from quire import AsyncClient, connections
from quire.types import Sampling
from services.runtime.rpc import transport as rpc
from tests.proxy import Proxy
from tests.waiting import until

from .conftest import PROMPT
from .fakes import FakeDecode, FakePrefill, expected

QUICK_KEEPALIVE = (
    ("grpc.keepalive_time_ms", 500),
    ("grpc.keepalive_timeout_ms", 500),
    ("grpc.http2.ping_timeout_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
)
"""The tests cannot wait for the real interval of 15 s."""


def quicker(options: Any) -> list[Any]:
    """The same options with other times."""
    changed = dict(QUICK_KEEPALIVE)
    assert changed.keys() <= {*dict(options), "grpc.keepalive_permit_without_calls"}
    return [*((name, value) for name, value in options if name not in changed), *changed.items()]


async def test_a_client_leaves_a_gateway_that_is_silent(
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection between client and gateway is half-open: keepalive ends the call, and the
    client continues the running request over the other address of the same gateway."""
    monkeypatch.setattr(connections, "_CHANNEL_OPTIONS", quicker(connections._CHANNEL_OPTIONS))
    decode, prefill = FakeDecode(), FakePrefill()
    harness = await make_harness(prefill, decode)
    decode.pause_after = 3
    address = await harness.listen()
    async with (
        Proxy(address) as proxy,
        AsyncClient(f"{proxy.address},{address}") as client,
        asyncio.timeout(20),
    ):
        tokens: list[int] = []
        async for delta in client.generate(list(PROMPT), Sampling(0.0, max_tokens=8)):
            tokens += delta.token_ids
            if len(tokens) == 3:
                proxy.hold()
                decode.go_on(pause_after=8)
    assert tokens == expected(PROMPT, 8)


async def test_a_gateway_cancels_requests_of_a_vanished_client(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells the gateway that the client is gone; its keepalive finds out."""
    monkeypatch.setattr(rpc, "_SERVER_OPTIONS", tuple(quicker(rpc._SERVER_OPTIONS)))
    _, decode = harness.workers
    decode.pause_after = 3
    async with Proxy(await harness.listen()) as proxy, AsyncClient(proxy.address) as client:
        stream = client.generate(list(PROMPT), Sampling(0.0, max_tokens=8))
        await anext(stream)
        proxy.hold()
        await until(lambda: bool(decode.aborted))
        assert not decode.running
        proxy.release()
        await stream.aclose()
