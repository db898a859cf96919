"""Requests that give way to others are swapped out and go on, between real processes."""

import asyncio
import os
import random
import signal
from contextlib import suppress
from pathlib import Path

import pytest

from quire.client import AsyncClient
from quire.errors import Unavailable

from .conftest import BLOCK_BYTES, STAMP_BYTES, Oracle
from .deployment import serving
from .quiet import quiet
from .test_serving import assert_clean, assert_greedy, greedy, prompt

NUM_BLOCKS = 64


@pytest.mark.parametrize("killed", ["", "services.decode", "services.prefill", "valkey"])
async def test_what_gives_way_is_swapped_out_and_goes_on(
    checkpoint: Path, oracle: Oracle, tmp_path: Path, killed: str
) -> None:
    """24 requests of 16 blocks each on 64 blocks, with as many to swap to: all tokens are right,
    some were swapped out, and a recount of both pools is right at any moment. `killed`: also when a
    worker dies, with what it has swapped out or is bringing back, or when Redis loses everything.
    """
    size = str(NUM_BLOCKS * (BLOCK_BYTES + STAMP_BYTES))
    options = ("--pool-memory", size, "--swap-memory", size, "--preemption", "swap")
    workers = ("--prefill", "2", "--decode", "2")  # whoever is killed leaves one of its kind
    with serving(checkpoint, tmp_path, *workers, *options) as running:
        client = AsyncClient(running.address)
        async with asyncio.timeout(60):
            while [len(pool.worker_ids) for pool in await client.pools()] != [4, 4]:
                await asyncio.sleep(0.05)
        name, beside = sorted(pool.model for pool in await client.pools())
        assert beside == f"{name}-swap"
        prompts = [prompt(100 + n, random.Random(n).randrange(10, 100)) for n in range(24)]
        asked = [client.complete(p, greedy(256 - len(p))) for p in prompts]
        tasks = [asyncio.create_task(one) for one in asked]
        if killed:
            await until_swapped(client, beside)
            os.kill(running.running(killed)[0], signal.SIGKILL)
        while not all(task.done() for task in tasks):
            if killed == "valkey":
                await audited_when_whole(client)
            else:
                assert_clean(await client.audit())
            await asyncio.sleep(0.1)
        completions = [task.result() for task in tasks]
        assert sum(completion.usage.num_preemptions for completion in completions) > 0
        for p, completion in zip(prompts, completions, strict=True):
            assert len(completion.token_ids) == 256 - len(p)
            assert_greedy(oracle, p, completion)
        await quiet(client)
        (colder,) = [p for p in await client.pools() if p.model == beside]
        assert colder.num_prefix_queries > 0
        await client.close()


async def audited_when_whole(client: AsyncClient) -> None:
    """No law is broken, as far as anybody can say while Redis is away and comes back."""
    with suppress(Unavailable):
        assert not any(audit.violations for audit in await client.audit())


async def until_swapped(client: AsyncClient, model: str) -> None:
    """Something is in the colder pool now."""
    async with asyncio.timeout(30):
        while not any(p.num_held for p in await client.pools() if p.model == model):
            await asyncio.sleep(0)
