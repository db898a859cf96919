"""Sends requests to a server and records what its clients see, for this project's benchmarks."""

import asyncio
import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any

import aiohttp

from quire.async_client import AsyncClient
from quire.connections import Tls
from quire.errors import QuireError
from quire.messages import Request
from quire.types import Sampling

Prompt = str | list[int]


class RequestFailed(Exception):
    """A request got no whole answer."""


class Prompts:
    """Draws prompts of token ids; the same seed gives the same prompts."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._random = random.Random(seed)
        self._ids = range(300, vocab_size)  # byte and special tokens come before

    def draw(self, length: int) -> list[int]:
        return self._random.choices(self._ids, k=length)


@dataclass(slots=True)
class Record:
    """One request as its client sees it. Times are those of `time.perf_counter`."""

    sent: float = field(default_factory=time.perf_counter)
    arrivals: list[float] = field(default_factory=list)
    """When chunks with tokens came."""
    counts: list[int] = field(default_factory=list)
    """The number of tokens in each of these chunks."""
    num_tokens: int = 0
    """The number of tokens in all chunks; at the end the number that the server counts."""
    error: str = ""
    """The reason why there is no whole answer."""

    def add(self, num_tokens: int, num_reported: int | None) -> None:
        """Note a chunk, and the count with which the server ends its answer."""
        if num_tokens:
            self.arrivals.append(time.perf_counter())
            self.counts.append(num_tokens)
        self.num_tokens = self.num_tokens + num_tokens if num_reported is None else num_reported

    @property
    def ttft_s(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def gaps_s(self) -> list[float]:
        """The times between two chunks."""
        return [later - earlier for earlier, later in pairwise(self.arrivals)]


class HttpTarget:
    """A server with OpenAI's `POST /v1/completions`. A chunk without `token_ids`, which vLLM and
    Quire send, counts as one token. `fields` are in every request's body."""

    def __init__(
        self,
        url: str,
        model: str,
        *,
        api_key: str = "",
        tls: Tls | None = None,
        fields: Mapping[str, Any] = {},
    ) -> None:
        self._url = f"{url}/v1/completions"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls.context() if tls else True),
            timeout=aiohttp.ClientTimeout(total=600.0),
            headers={"Authorization": f"Bearer {api_key}"},
        )
        options = {"include_usage": True}
        self._fields = {"model": model, "stream": True, "stream_options": options, **fields}

    async def ask(self, prompt: Prompt, num_tokens: int, record: Record) -> None:
        """Send a request and record what comes. Raises RequestFailed."""
        body = self._fields | {"prompt": prompt, "max_tokens": num_tokens}
        try:
            async with self._session.post(self._url, json=body) as response:
                if response.status != 200:
                    raise RequestFailed(f"status {response.status}: {await response.text()}")
                async for line in response.content:
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    if data:
                        _add(json.loads(data), record)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise RequestFailed(f"{self._url}: {type(error).__name__}: {error}") from error
        raise RequestFailed("the stream ended without [DONE]")

    async def close(self) -> None:
        await self._session.close()


def _add(event: dict[str, Any], record: Record) -> None:
    if "error" in event:
        raise RequestFailed(str(event["error"]))
    num_tokens = 0
    for choice in event["choices"]:
        ids: list[int] | None = choice.get("token_ids")
        num_tokens += bool(choice["text"]) if ids is None else len(ids)
    record.add(num_tokens, (event.get("usage") or {}).get("completion_tokens"))


class GrpcTarget:
    """Quire's gateway. `client` is closed with the target."""

    def __init__(self, client: AsyncClient, sampling: Sampling) -> None:
        self._client = client
        self._sampling = sampling

    async def ask(self, prompt: Prompt, num_tokens: int, record: Record) -> None:
        """Send a request and record what comes. Raises RequestFailed."""
        request = Request(prompt, replace(self._sampling, max_tokens=num_tokens))
        try:
            async with self._client.send(request, 600.0) as deltas:
                async for delta in deltas:
                    reported = delta.usage.num_generated_tokens if delta.usage else None
                    record.add(len(delta.token_ids), reported)
        except QuireError as error:
            raise RequestFailed(str(error)) from error

    async def close(self) -> None:
        await self._client.close()


Target = HttpTarget | GrpcTarget
"""A server. It is made inside a running event loop."""


async def send(target: Target, prompt: Prompt, num_tokens: int, record: Record) -> None:
    """Send a request and record what comes. An answer of another length counts as failed."""
    try:
        await target.ask(prompt, num_tokens, record)
        if record.num_tokens != num_tokens:
            raise RequestFailed(f"{record.num_tokens} tokens instead of {num_tokens}")
    except RequestFailed as error:
        record.error = str(error)


async def send_all(
    target: Target,
    prompts: Sequence[Prompt],
    num_tokens: int,
    *,
    times: Sequence[float] = (),
    at_a_time: int | None = None,
) -> list[Record]:
    """Send each prompt at its time, in seconds from now, whether the server keeps up or not; or all
    at once, but at most `at_a_time` of them together."""
    began = time.perf_counter()
    places = asyncio.Semaphore(at_a_time or len(prompts))

    async def one(prompt: Prompt, due: float) -> Record:
        await asyncio.sleep(began + due - time.perf_counter())
        async with places:
            record = Record()
            await send(target, prompt, num_tokens, record)
            return record

    return await asyncio.gather(*map(one, prompts, times or [0.0] * len(prompts)))


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Yield random times of arrivals, `rate` a second."""
    draw = random.Random(seed)
    return accumulate(iter(lambda: draw.expovariate(rate), None))
