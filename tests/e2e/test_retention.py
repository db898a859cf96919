"""A retained prefix survives a flood of other prompts that evicts everything else, and is then read
from the cache, with the same tokens; when its time has ended, the next flood evicts it."""

import asyncio
import json
import random
from typing import Any

import httpx
import pytest

from quire.async_client import AsyncClient
from quire.cli import main
from tests.waiting import until

from .deployment import Deployment
from .quiet import quiet

NUM_BLOCKS = 128
LONG, NUM_TOKENS = 200, 16
"""The prefix is 12 full blocks of 16 tokens, and 8 tokens."""


def prompt(number: int, length: int = LONG) -> list[int]:
    chance = random.Random(number)
    return [chance.randrange(259, 384) for _ in range(length)]


@pytest.fixture(scope="module")
def deployment(observed: Deployment) -> Deployment:
    return observed


class Caller:
    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def complete(self, token_ids: list[int], **fields: Any) -> tuple[list[int], Any]:
        """The greedy tokens, and the usage."""
        body = {"prompt": token_ids, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
        body |= {"return_token_ids": True, **fields}
        answer = (await self.http.post("/v1/completions", json=body)).json()
        return answer["choices"][0]["token_ids"], answer["usage"]

    async def num_cached(self, token_ids: list[int]) -> int:
        _, usage = await self.complete(token_ids, max_tokens=1)
        return int(usage["prompt_tokens_details"]["cached_tokens"])

    async def flood(self, first: int) -> None:
        """Prompts of two pools, four at a time: together they hold less than half of the pool."""
        for four in range(first, first + 2 * NUM_BLOCKS // (LONG // 16), 4):
            numbers = range(four, four + 4)
            await asyncio.gather(*(self.complete(prompt(number)) for number in numbers))


async def test_a_retained_prefix_survives_a_flood_until_its_time_ends(
    deployment: Deployment, capsys: pytest.CaptureFixture[str]
) -> None:
    async with (
        AsyncClient(deployment.address, operations=deployment.operations) as client,
        httpx.AsyncClient(base_url=deployment.http, timeout=60, trust_env=False) as http,
    ):
        caller, retained, other = Caller(http), prompt(1), prompt(2)
        before, _ = await caller.complete(retained)
        await caller.complete(other)
        body = {"name": "p", "tokens": retained, "ttl": 3600}
        answer = (await http.post("/v1/cache", json=body)).json()
        assert (answer["status"], answer["retained_tokens"]) == ("accepted", 192)
        await caller.flood(100)
        assert await caller.num_cached(other) == 0
        after, usage = await caller.complete(retained)
        assert after == before
        details = usage["prompt_tokens_details"]
        assert details == {"cached_tokens": 192, "cache_write_tokens": 0}
        (pool,) = await client.pools()
        assert pool.num_retained == 12

        command = ["cache", "list", "--json", "--url", deployment.http]
        assert await asyncio.to_thread(main, command) == 0
        assert [each["cached_tokens"] for each in json.loads(capsys.readouterr().out)] == [192]
        await http.post("/v1/cache", json={**body, "ttl": 1, "warm": False})

        async def is_over() -> bool:
            return not (await http.get("/v1/cache")).json()["data"]

        await until(is_over, limit_s=10)
        await caller.flood(200)
        assert await caller.num_cached(retained) == 0
        await quiet(client)


async def test_a_clipped_prefix_and_a_full_pool_refuse_no_request(deployment: Deployment) -> None:
    """A quarter of the pool is retained; a prompt that needs the whole pool is served."""
    async with (
        AsyncClient(deployment.address, operations=deployment.operations) as client,
        httpx.AsyncClient(base_url=deployment.http, timeout=60, trust_env=False) as http,
    ):
        caller, long = Caller(http), prompt(3, 1000)
        more = {"prompt_cache_retention": "24h", "prompt_cache_key": "k"}
        tokens, usage = await caller.complete(long, **more)
        (answer,) = usage["retained"]
        assert (answer["status"], answer["retained_tokens"]) == ("clipped", 32 * 16)
        whole, _ = await caller.complete(prompt(4, 16 * NUM_BLOCKS - 17), max_tokens=16)
        assert len(whole) == 16
        assert (await caller.complete(long))[0] == tokens
        assert (await http.delete("/v1/cache/k")).status_code == 200
        await quiet(client)
