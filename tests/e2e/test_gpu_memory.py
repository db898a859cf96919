"""A pool that is kept like a GPU's: memory behind file descriptors, a keeper, and workers that
count as dead only when no process maps the memory. It needs no GPU: the memory is the host's
(`kvops.cuda.memfd`)."""

import asyncio
import os
import signal

from quire.async_client import AsyncClient
from quire.errors import QuireError
from quire.types import Sampling
from services.pool.directory import PoolDirectory
from tests.waiting import until

from .conftest import POOL_MEMORY
from .decoders import living
from .deployment import Deployment, deploying
from .test_crashes import LIMIT_S, PoolView, all_serve, arena_of, pool_view, streams

__all__ = ["pool_view"]
ARGS = ("--device", "memfd:0", "--pool-memory", str(2 * POOL_MEMORY))


deployment = deploying("--prefill", "2", "--decode", "2", *ARGS)


async def test_the_pool_outlives_the_processes_that_made_it(
    deployment: Deployment, client: AsyncClient, pool_view: PoolView
) -> None:
    """Every worker, also the one that made the memory, is killed while streams run, one of each
    kind at a time, and then the block manager: no token changes, the laws hold, and the pool stays
    the same."""
    await all_serve(client)
    memory = arena_of(deployment, pool_view.directory).stat().st_ino
    undisturbed = [await stream.run(client) for stream in streams(5)]
    rounds = [
        *zip(pids(deployment, "decode"), pids(deployment, "prefill"), strict=True),
        pids(deployment, "block_manager"),
    ]
    for victims in rounds:
        before, disturbed = await worker_ids(client), streams(5)
        running = [asyncio.create_task(stream.run(client)) for stream in disturbed]
        await disturbed[0].reaches(20)
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(LIMIT_S):
            assert await asyncio.gather(*running) == undisturbed
        await replaced(client, before, len(victims) if len(victims) == 2 else 0)
    assert not {pid for victims in rounds for pid in victims} & set(deployment.children())
    assert arena_of(deployment, pool_view.directory).stat().st_ino == memory
    reaped = '"event": "worker_reaped"'
    await until(deployment.log.read_text, lambda log: log.count(reaped) == 4)


async def test_a_pool_without_workers_waits_for_them(
    deployment: Deployment, client: AsyncClient, pool_view: PoolView
) -> None:
    """A fault that ends all workers at once, as under MPS, costs no finished block."""
    await all_serve(client)
    prompt = list(range(260, 360))
    first, before = await streams_of(client, prompt), await worker_ids(client)
    for name in ("decode", "prefill"):
        for pid in pids(deployment, name):
            os.kill(pid, signal.SIGKILL)
    await until(lambda: is_reaped(pool_view.directory))
    await replaced(client, before, 4)
    assert await streams_of(client, prompt) == (first[0], 96)


async def worker_ids(client: AsyncClient) -> set[str]:
    try:
        return {worker.worker_id for worker in await living(client)}
    except QuireError:  # the block manager is not back
        return set()


async def replaced(client: AsyncClient, before: set[str], number: int) -> None:
    """Wait until `number` of the four workers are new and all four serve."""
    await until(
        lambda: worker_ids(client), lambda now: (len(now), len(now - before)) == (4, number)
    )
    await all_serve(client)


async def streams_of(client: AsyncClient, prompt: list[int]) -> tuple[list[int], int | None]:
    greedy = Sampling(temperature=0.0, max_tokens=20, ignore_eos=True)
    completion = await client.complete(prompt, greedy, timeout_s=LIMIT_S)
    return list(completion.token_ids), completion.usage.num_cached_tokens


def is_reaped(directory: PoolDirectory) -> bool:
    return not directory.worker_ids()


def pids(deployment: Deployment, name: str) -> list[int]:
    return deployment.running(f"(services[.]|--role=){name}")
