"""Blocks in files: they outlive the whole run, and no fault of theirs changes a token."""

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from quire.async_client import AsyncClient
from quire.types import Sampling
from tests.waiting import wait_until

from .conftest import POOL_BLOCKS, POOL_MEMORY, Oracle
from .deployment import Deployment, remove, serving, start
from .quiet import quiet

GREEDY = Sampling(temperature=0.0, max_tokens=4, ignore_eos=True)
NUM_BLOCKS = 20


@pytest.fixture(scope="module")
def deployment(
    checkpoint: Path, oracle: Oracle, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """The second run on a cache directory. The first one got prompt 0 twice, and was killed with
    everything in it."""

    async def ask_twice() -> None:
        async with AsyncClient(first.address) as client:
            for _ in range(2):
                await ask(client, oracle, 0)

    cache = tmp_path_factory.mktemp("disk") / "cache"
    options = ("--pool-memory", str(POOL_MEMORY), "--cache-directory", str(cache))
    first = start(checkpoint, tmp_path_factory.mktemp("run"), *options)
    try:
        first.wait_until_ready()
        asyncio.run(ask_twice())
        wait_until(lambda: len(list(cache.glob("*/*"))) == NUM_BLOCKS)
    finally:
        first.process.kill()
        first.process.wait()
        remove(first.run_root)
    with serving(checkpoint, tmp_path_factory.mktemp("run"), *options) as second:
        yield second


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(deployment.address, operations=deployment.operations) as client:
        yield client
        await quiet(client)


async def ask(client: AsyncClient, oracle: Oracle, number: int) -> int:
    """The cached tokens of a prompt, whose answer must be transformers'."""
    chance = random.Random(number)
    prompt = [chance.randrange(259, 384) for _ in range(NUM_BLOCKS * 16 + 5)]
    answer = await client.complete(prompt, GREEDY, timeout_s=60)
    assert list(answer.token_ids) == oracle.choices(prompt, answer.token_ids)
    return answer.usage.num_cached_tokens or 0


async def flood(client: AsyncClient, oracle: Oracle, first: int) -> None:
    """Other prompts take all blocks of the pool."""
    others = range(first, first + POOL_BLOCKS // NUM_BLOCKS + 1)
    await asyncio.gather(*(ask(client, oracle, number) for number in others))


async def test_prompt_outlives_everything_but_its_files(
    client: AsyncClient, oracle: Oracle
) -> None:
    """After the restart, and again after a flood."""
    assert await ask(client, oracle, 0) == NUM_BLOCKS * 16
    await flood(client, oracle, 1000)
    assert await ask(client, oracle, 0) == NUM_BLOCKS * 16
