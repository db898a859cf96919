"""Connections that are slow, cut or half-open: no token is lost, and no client waits without
end."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from quire import AsyncClient, connections
from quire.types import Sampling
from services.runtime.rpc import transport as rpc
from tests.proxy import Proxy
from tests.waiting import until

from .conftest import PROMPT, Call, GatewayHarness, asked
from .fakes import FakeDecode, FakePrefill, expected, member, start

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


class Partitioned:
    """A gateway, a prefill worker, and decode workers each behind a proxy."""

    def __init__(
        self, harness: GatewayHarness, decode: list[FakeDecode], proxies: list[Proxy]
    ) -> None:
        self.harness = harness
        self.decode = decode
        self.proxies = proxies


@pytest.fixture
async def partitioned(make_harness: Any) -> AsyncIterator[Partitioned]:
    """`decode-1` has more slots, and so is chosen first."""
    harness = await make_harness(FakePrefill())
    decode = [FakeDecode("decode-1", num_slots=64), FakeDecode("decode-2", num_slots=8)]
    async with AsyncExitStack() as stack:
        proxies = []
        for worker in decode:
            server, address = await start(worker)
            stack.push_async_callback(server.stop)
            proxy = await stack.enter_async_context(Proxy(address))
            proxies.append(proxy)
            one = member(worker, proxy.address, str(harness.model_dir))
            await harness.registry.announce(one, ttl_s=1e6)
        await until(lambda: {"decode-1", "decode-2"} <= harness.connected())
        yield Partitioned(harness, decode, proxies)


async def underway(at: Partitioned) -> Call:
    """A request that has 3 tokens from `decode-1`."""
    for decode in at.decode:
        decode.pause_after = 3
    call = Call(at.harness.gateway, asked())
    await until(lambda: len(call.tokens) == 3)
    return call


async def test_a_slow_connection_only_delays_requests(partitioned: Partitioned) -> None:
    for proxy in partitioned.proxies:
        proxy.delay_s = 0.02
    call = Call(partitioned.harness.gateway, asked())
    await call.result()
    assert call.tokens == expected(PROMPT, 8)


async def test_a_half_open_connection_is_given_up(partitioned: Partitioned) -> None:
    """The worker goes on decoding, but the gateway receives nothing. The request continues at the
    other worker, and when the connection is repaired, the events of the first worker are
    dropped."""
    call = await underway(partitioned)
    partitioned.proxies[0].hold()
    partitioned.decode[0].go_on(pause_after=8)
    partitioned.decode[1].go_on(pause_after=8)
    await call.result()
    partitioned.proxies[0].release()
    assert call.tokens == expected(PROMPT, 8)
    await until(lambda: not partitioned.decode[0].slots)
    again = Call(partitioned.harness.gateway, asked("r2"))
    await again.result()
    assert again.tokens == expected(PROMPT, 8)


async def test_an_unreachable_worker_gets_no_request(partitioned: Partitioned) -> None:
    await partitioned.proxies[0].close()
    await until(lambda: partitioned.harness.connected() == {"prefill-1", "decode-2"})
    call = Call(partitioned.harness.gateway, asked())
    await call.result()
    assert call.tokens == expected(PROMPT, 8)


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
    make_harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells the gateway that the client is gone; its keepalive finds out."""
    monkeypatch.setattr(rpc, "_SERVER_OPTIONS", tuple(quicker(rpc._SERVER_OPTIONS)))
    decode = FakeDecode()
    harness = await make_harness(FakePrefill(), decode)
    decode.pause_after = 3
    async with Proxy(await harness.listen()) as proxy, AsyncClient(proxy.address) as client:
        stream = client.generate(list(PROMPT), Sampling(0.0, max_tokens=8))
        await anext(stream)
        proxy.hold()
        await until(lambda: bool(decode.aborted))
        assert not decode.running
        proxy.release()
        await stream.aclose()
