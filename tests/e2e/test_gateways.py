"""A deployment with two gateways: when one is killed, every stream goes on."""

import asyncio
import json
import os
import signal
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from quire.async_client import AsyncClient
from quire.types import Sampling

from .conftest import Oracle
from .deployment import Deployment, deploying
from .quiet import quiet

PROMPT = list(range(260, 300))
NUM_TOKENS = 200
LONG = 1000
GREEDY = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = Sampling(temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=7)


deployment = deploying("--pool-memory", "16MiB", num_gateways=2)


async def test_streams_outlive_their_gateway(deployment: Deployment, oracle: Oracle) -> None:
    """Greedy and sampled streams get every token of an undisturbed run; afterwards nothing is
    held."""
    started = asyncio.Semaphore(0)

    async def stream(client: AsyncClient, sampling: Sampling) -> list[int]:
        tokens: list[int] = []
        async for delta in client.generate(PROMPT, sampling, timeout_s=60.0):
            tokens += delta.token_ids
            started.release()
        return tokens

    async with (
        AsyncClient(deployment.address, operations=deployment.operations) as client,
        asyncio.timeout(90),
    ):
        undisturbed = await stream(client, SAMPLED)
        started = asyncio.Semaphore(0)
        streams = [
            asyncio.create_task(stream(client, sampling))
            for sampling in (GREEDY, SAMPLED)
            for _ in range(8)
        ]
        for _ in streams:
            await started.acquire()
        os.kill(deployment.gateway(client.address), signal.SIGKILL)
        results = await asyncio.gather(*streams)
        assert results[:8] == [oracle.greedy(PROMPT, NUM_TOKENS)] * 8
        assert results[8:] == [undisturbed] * 8
        await quiet(client, 8.0)  # sooner than the window closes: nothing stayed parked


class Reader:
    """A client of the HTTP API that keeps the text and the tokens of each choice."""

    def __init__(self, http: httpx.AsyncClient, **body: Any) -> None:
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.texts: dict[int, str] = defaultdict(str)
        self.num_openings = 0
        self._http = http
        self._ends: dict[int, str] = {}
        self._body = {**body, "stream": True, "return_token_ids": True, "ignore_eos": True}

    def go_on(self) -> None:
        """From now on, ask for the rest of the answer."""
        self._body["received"] = [
            {"index": index, "token_ids": token_ids, "finish_reason": self._ends.get(index)}
            for index, token_ids in self.tokens.items()
        ]

    async def read(self, url: str) -> AsyncIterator[None]:
        """Read until the end; httpx.TransportError: the connection broke."""
        async with self._http.stream("POST", url, json=self._body) as answer:
            assert answer.status_code == 200, await answer.aread()
            self._body.setdefault("resume_token", answer.headers.get("x-quire-resume-token"))
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line.removeprefix("data: "))["choices"]:
                        self._take(choice)
                    yield

    async def read_all(self, url: str) -> None:
        async for _ in self.read(url):
            pass

    def _take(self, choice: dict[str, Any]) -> None:
        self.num_openings += "role" in choice.get("delta", {})
        said = choice["delta"]["content"] if "delta" in choice else choice["text"]
        self.texts[choice["index"]] += said
        self.tokens[choice["index"]] += choice["token_ids"]
        if choice["finish_reason"]:
            self._ends[choice["index"]] = choice["finish_reason"]


BODIES: dict[str, dict[str, Any]] = {
    "completions": {"prompt": PROMPT},
    "chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
}


@pytest.mark.parametrize("path", BODIES)
async def test_an_http_stream_goes_on_at_another_gateway(deployment: Deployment, path: str) -> None:
    """Two samples get each token and each character of an undisturbed run once."""
    deployment.wait_until_ready()
    asked = {**BODIES[path], "n": 2, "seed": 7, "temperature": 1, "max_tokens": LONG}
    first = deployment.address.split(",")[0]
    port = int(urlsplit(deployment.http).port or 0)
    urls = [f"http://127.0.0.1:{port + index}/v1/{path}" for index in range(2)]
    async with httpx.AsyncClient(timeout=60.0, trust_env=False) as http, asyncio.timeout(90):
        undisturbed = Reader(http, **asked)
        await undisturbed.read_all(urls[1])
        reader, is_killed = Reader(http, request_id=f"resumed {path}", **asked), False
        with pytest.raises(httpx.TransportError):  # noqa: PT012
            async for _ in reader.read(urls[0]):
                if not is_killed and all(reader.tokens[index] for index in range(2)):
                    os.kill(deployment.gateway(first), signal.SIGKILL)
                    is_killed = True
        assert 0 < sum(map(len, reader.tokens.values())) < 2 * LONG
        reader.go_on()
        await reader.read_all(urls[1])
    assert (reader.tokens, reader.texts) == (undisturbed.tokens, undisturbed.texts)
    assert reader.num_openings == undisturbed.num_openings
