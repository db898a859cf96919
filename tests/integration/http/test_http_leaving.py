"""HTTP clients disconnect, and the server stops: nothing is computed without a reader."""

import asyncio
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from services.gateway.http.app import create_app
from services.gateway.http.server import http_server

from .conftest import HI, FakeGenerator, soon
from .raw import connected, post


@pytest.mark.parametrize(
    ("path", "body", "pause_at"),
    [
        ("completions", {"prompt": "Hi", "stream": True}, 0),
        ("completions", {"prompt": "Hi", "stream": True}, 2),
        ("chat/completions", HI, 1),
        ("messages", {**HI, "max_tokens": 9}, 1),
        ("messages", {**HI, "max_tokens": 9, "stream": True}, 1),
        ("rerank", {"query": "a", "documents": ["b"]}, 1),
    ],
)
async def test_leaving_an_answer_closes_the_generator(
    http: httpx.AsyncClient,
    generator: FakeGenerator,
    path: str,
    body: dict[str, Any],
    pause_at: int,
) -> None:
    """At once, while the client waits for its first token or for a later one."""
    generator.pause_at = pause_at
    task = asyncio.create_task(http.post(f"/v1/{path}", json=body))
    async with soon():
        await generator.paused.wait()
        assert not generator.closed.is_set()
        task.cancel()
        await generator.closed.wait()


async def test_a_reset_connection_closes_the_generator(port: int, generator: FakeGenerator) -> None:
    """A killed client's connection ends with a reset."""
    generator.pause_at = 1
    async with soon():
        async with connected(port) as connection:
            connection.send(post(b'{"prompt": "Hi", "stream": true}'))
            await connection.reader.readuntil(b"data: ")
            await generator.paused.wait()
            connection.reset_on_close()
        await generator.closed.wait()


async def test_stopping_ends_requests_after_the_grace(generator: FakeGenerator) -> None:
    """A request that does not end by itself is cancelled, and its generator closed."""
    generator.pause_at = 1
    app = create_app(generator, CollectorRegistry())
    async with soon():
        async with http_server(app, "127.0.0.1", 0, grace_s=0) as port:
            client = httpx.AsyncClient(trust_env=False)
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            task = asyncio.create_task(client.post(url, json=HI))
            await generator.paused.wait()
        assert generator.closed.is_set()
        await asyncio.wait([task])
        assert task.exception() is not None or task.result().status_code >= 500
        await client.aclose()
