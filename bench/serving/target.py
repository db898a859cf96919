"""A server that is measured: Quire's gateway over gRPC, or any with OpenAI's HTTP API.

The generator shares the machine with the server, so it must be light: HTTP is read by hand, a few
microseconds a token where a client library takes a hundred.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol
from urllib.parse import urlsplit

from quire.async_client import AsyncClient
from quire.errors import QuireError
from quire.types import Sampling

Prompt = list[int] | str


class RequestFailed(Exception):
    """The server refused a request or broke it off."""


class Target(Protocol):
    def stream(self, prompt: Prompt, num_tokens: int) -> AsyncGenerator[int, None]:
        """Exactly `num_tokens`, greedy; yields how many came together. Closing it cancels the
        request. RequestFailed."""

    async def close(self) -> None: ...


class GatewayTarget:
    """Quire at `address` (host:port). Make it inside a running loop."""

    def __init__(self, address: str) -> None:
        self._client = AsyncClient(address)

    async def stream(self, prompt: Prompt, num_tokens: int) -> AsyncGenerator[int, None]:
        sampling = Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        try:
            async with aclosing(self._client.generate(prompt, sampling)) as deltas:
                async for delta in deltas:
                    if delta.token_ids:
                        yield len(delta.token_ids)
        except QuireError as error:
            raise RequestFailed(str(error)) from error

    async def close(self) -> None:
        await self._client.close()


class HttpTarget:
    """A server at `url` with `POST /v1/completions`; a connection for each request."""

    def __init__(self, url: str, model: str) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        self._model = model

    async def stream(self, prompt: Prompt, num_tokens: int) -> AsyncGenerator[int, None]:
        """Where chunks do not say their `token_ids`, each counts as one token; what the final usage
        has beyond that (characters that end late) is added to the last."""
        total = 0
        async with aclosing(self._events(prompt, num_tokens)) as events:
            async for event in events:
                if "error" in event:
                    raise RequestFailed(json.dumps(event["error"]))
                count = sum(_num_tokens(choice) for choice in event.get("choices", ()))
                usage = event.get("usage") or {}
                missing = usage.get("completion_tokens", total) - total - count
                count += max(missing, 0)
                total += count
                if count:
                    yield count

    async def _events(
        self, prompt: Prompt, num_tokens: int
    ) -> AsyncGenerator[dict[str, Any], None]:
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port)
        except OSError as error:
            raise RequestFailed(str(error)) from error
        try:
            writer.write(self._request(prompt, num_tokens))
            async for event in server_sent_events(reader):
                yield event
        finally:
            writer.close()

    def _request(self, prompt: Prompt, num_tokens: int) -> bytes:
        body = json.dumps(
            {
                "model": self._model,
                "prompt": prompt,
                "max_tokens": num_tokens,
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
                "return_token_ids": True,
            }
        ).encode()
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {self._host}\r\nConnection: close\r\n"
            f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    async def close(self) -> None:
        """Nothing is kept between requests."""


def _num_tokens(choice: dict[str, Any]) -> int:
    """A chunk that only says why it ended has neither text nor ids."""
    ids = choice.get("token_ids")
    if ids is not None:
        return len(ids)
    return 1 if choice.get("text") else 0


async def server_sent_events(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of an HTTP answer, as they come. RequestFailed: another status than 200, or
    it was broken off."""
    try:
        status, chunked = await _read_head(reader)
        if status != 200:
            text = b"".join([piece async for piece in _pieces(reader, chunked)])
            raise RequestFailed(f"status {status}: {text[:500].decode(errors='replace')}")
        rest = b""
        async for piece in _pieces(reader, chunked):
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                if line.startswith(b"data: {"):
                    yield json.loads(line[len(b"data: ") :])
    except (OSError, asyncio.IncompleteReadError) as error:
        raise RequestFailed(f"connection lost: {error}") from error


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, bool]:
    """Status, and whether the body comes in chunks."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
    return int(head.split(maxsplit=2)[1]), "transfer-encoding: chunked" in head


async def _pieces(reader: asyncio.StreamReader, chunked: bool) -> AsyncIterator[bytes]:
    """The body as it comes. IncompleteReadError: it ended inside a chunk."""
    if not chunked:
        while piece := await reader.read(65_536):
            yield piece
        return
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]
