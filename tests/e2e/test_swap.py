"""Requests that give way to others are swapped out and go on, between real processes."""

import asyncio
import random
from pathlib import Path

from quire.client import AsyncClient

from .conftest import BLOCK_BYTES, STAMP_BYTES, Oracle
from .deployment import serving
from .test_serving import assert_clean, assert_greedy, greedy, prompt, settled

NUM_BLOCKS = 64


async def test_what_gives_way_is_swapped_out_and_goes_on(
    checkpoint: Path, oracle: Oracle, tmp_path: Path
) -> None:
    """24 requests of 16 blocks each on 64 blocks, with as many to swap to: all tokens are right,
    some were swapped out, and a recount of both pools is right at any moment."""
    size = str(NUM_BLOCKS * (BLOCK_BYTES + STAMP_BYTES))
    options = ("--pool-memory", size, "--swap-memory", size, "--preemption", "swap")
    with serving(checkpoint, tmp_path, "--decode", "2", *options) as running:
        client = AsyncClient(running.address)
        pools = {pool.model: pool for pool in await client.pools()}
        name = next(model for model in pools if not model.endswith("-swap"))
        assert set(pools) == {name, f"{name}-swap"}
        assert {len(pool.worker_ids) for pool in pools.values()} == {3}
        prompts = [prompt(100 + n, random.Random(n).randrange(10, 100)) for n in range(24)]
        asked = [client.complete(p, greedy(256 - len(p))) for p in prompts]
        tasks = [asyncio.create_task(one) for one in asked]
        while not all(task.done() for task in tasks):
            assert_clean(await client.audit())
            await asyncio.sleep(0.1)
        completions = [task.result() for task in tasks]
        assert sum(completion.usage.num_preemptions for completion in completions) > 0
        for p, completion in zip(prompts, completions, strict=True):
            assert len(completion.token_ids) == 256 - len(p)
            assert_greedy(oracle, p, completion)
        await settled(client)
        (colder,) = [p for p in await client.pools() if p.model == f"{name}-swap"]
        assert colder.num_prefix_queries > 0
        await client.close()
