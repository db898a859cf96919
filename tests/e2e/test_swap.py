"""Preempted requests are swapped out and swapped back in, between real processes."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire.async_client import AsyncClient
from quire.errors import Unavailable
from quire.types import Beam, Completion, Pool, Sampling
from tests.waiting import until

from .conftest import BLOCK_BYTES, STAMP_BYTES, Oracle
from .deployment import Deployment, serving
from .quiet import quiet
from .test_serving import assert_clean, assert_greedy, greedy, prompt

NUM_BLOCKS = 64
SIZE = NUM_BLOCKS * (BLOCK_BYTES + STAMP_BYTES)
DEVICE: tuple[str, ...] = ()
KILLED = ["", "--role=decode", "--role=prefill", "valkey"]
"""Cases in which a worker dies with requests that it has swapped out or is swapping in, or Redis
loses its data."""


def sample(*names: str) -> list[Any]:
    """All cases; `make test` takes only `names` of KILLED."""
    return [pytest.param(name, marks=[] if name in names else pytest.mark.full) for name in KILLED]


@asynccontextmanager
async def swapping(
    checkpoint: Path, folder: Path, swap_bytes: int
) -> AsyncIterator[tuple[Deployment, AsyncClient, str]]:
    """Two workers of each kind on 64 blocks, so that one of a kind is left when one is killed.
    Yields a client and the swap pool's model name; afterwards nothing is held."""
    memory = ("--pool-memory", str(SIZE), "--swap-memory", str(swap_bytes))
    options = ("--prefill", "2", "--decode", "2", *memory, "--preemption", "swap", *DEVICE)
    with serving(checkpoint, folder, *options) as running:
        client = AsyncClient(running.address, operations=running.operations)
        await until(client.pools, lambda pools: [len(p.worker_ids) for p in pools] == [4, 4])
        name, beside = sorted(pool.model for pool in await client.pools())
        assert beside == f"{name}-swap"
        yield running, client, beside
        await quiet(client)
        (swap_pool,) = [p for p in await client.pools() if p.model == beside]
        assert swap_pool.num_prefix_queries > 0
        await client.close()


async def all_of(
    asked: Iterable[Coroutine[Any, Any, Completion]],
    client: AsyncClient,
    kill: Callable[[], Awaitable[None]] | None,
    *,
    is_whole: bool,
) -> list[Completion]:
    """Run all requests at once, with clean audits meanwhile. A process dies once a request is
    swapped out."""
    tasks = [asyncio.create_task(one) for one in asked]
    if kill is not None:
        await kill()
    while not all(task.done() for task in tasks):
        if is_whole:
            assert_clean(await client.audit())
        else:
            await audited_when_whole(client)
        await asyncio.sleep(0.1)
    return [task.result() for task in tasks]


@pytest.mark.parametrize("killed", sample("--role=decode"))
async def test_a_preempted_request_is_swapped_out_and_goes_on(
    checkpoint: Path, oracle: Oracle, tmp_path: Path, killed: str
) -> None:
    """24 requests of 16 blocks on 64 blocks, with as many blocks to swap to: all tokens are right,
    some requests were swapped out, and a recount of both pools is clean at any moment."""
    async with swapping(checkpoint, tmp_path, SIZE) as (running, client, beside):
        prompts = [prompt(100 + n, random.Random(n).randrange(10, 100)) for n in range(24)]
        asked = [client.complete(p, greedy(256 - len(p))) for p in prompts]
        kill = partial(kill_when_swapped, running, client, beside, killed) if killed else None
        completions = await all_of(asked, client, kill, is_whole=killed != "valkey")
        assert sum(completion.usage.num_preemptions for completion in completions) > 0
        for p, completion in zip(prompts, completions, strict=True):
            assert len(completion.token_ids) == 256 - len(p)
            assert_greedy(oracle, p, completion)


@pytest.mark.parametrize("killed", sample("--role=prefill"))
async def test_groups_and_searches_are_swapped_out_and_go_on(
    checkpoint: Path, tmp_path: Path, killed: str
) -> None:
    """Groups of up to 50 blocks each on 64 blocks, with twice as many to swap to: their answers are
    those that they have alone."""
    async with swapping(checkpoint, tmp_path, 2 * SIZE) as (running, client, beside):
        fixed: dict[str, Any] = {"max_tokens": 160, "ignore_eos": True}
        kinds = [
            Sampling(n=4, temperature=1.0, seed=3, **fixed),
            Sampling(n=4, temperature=0.0, **fixed),
            Sampling(n=2, beam=Beam(4), **fixed),
        ]
        requests = [(prompt(200 + n, 20 + 7 * n), kinds[n % 3]) for n in range(9)]
        alone = [await client.complete(p, sampling) for p, sampling in requests]
        asked = [client.complete(p, sampling) for p, sampling in requests]
        kill = partial(kill_when_swapped, running, client, beside, killed) if killed else None
        together = await all_of(asked, client, kill, is_whole=killed != "valkey")
        assert list(map(found_by, together)) == list(map(found_by, alone))
        assert sum(completion.usage.num_preemptions for completion in together) > 0


def found_by(completion: Completion) -> list[tuple[int, ...]]:
    return [choice.token_ids for choice in completion.choices]


async def kill_when_swapped(
    running: Deployment, client: AsyncClient, model: str, name: str
) -> None:
    await until_swapped(client, model)
    os.kill(running.running(name)[0], signal.SIGKILL)


async def audited_when_whole(client: AsyncClient) -> None:
    """Audits are clean whenever a gateway can answer, also while Redis is away and recovers."""
    with suppress(Unavailable):
        assert not any(audit.violations for audit in await client.audit())


async def until_swapped(client: AsyncClient, model: str) -> None:
    """Wait until a request is in the swap pool."""

    def has_swapped(pools: tuple[Pool, ...]) -> bool:
        return any(pool.num_held for pool in pools if pool.model == model)

    await until(client.pools, has_swapped, longest_pause_s=0)
