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


deployment = deploying(
    *("--prefill", "2", "--decode", "2"),
    *("--device", "memfd:0", "--pool-memory", str(2 * POOL_MEMORY)),
)


async def test_the_pool_outlives_the_processes_that_made_it(
    deployment: Deployment, client: AsyncClient, pool_view: PoolView
) -> None:
    """The block manager and a worker of each kind are killed while streams run: no token changes.
    Then a fault ends all workers at once, as under MPS, and costs no finished block."""
    await all_serve(client)
    memory = arena_of(deployment, pool_view.directory).stat().st_ino
    undisturbed = await asyncio.gather(*(stream.run(client) for stream in streams(5)))
    before, disturbed = await worker_ids(client), streams(5)
    running = [asyncio.create_task(stream.run(client)) for stream in disturbed]
    await disturbed[0].reaches(20)
    for name in ("decode", "prefill", "block_manager"):
        os.kill(pids(deployment, name)[0], signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.gather(*running) == undisturbed
    await replaced(client, before, 2)
    prompt = list(range(260, 360))
    first, before = await streams_of(client, prompt), await worker_ids(client)
    for name in ("decode", "prefill"):
        for pid in pids(deployment, name):
            os.kill(pid, signal.SIGKILL)
    await until(lambda: is_reaped(pool_view.directory))
    await replaced(client, before, 4)
    assert await streams_of(client, prompt) == (first[0], 96)
    assert arena_of(deployment, pool_view.directory).stat().st_ino == memory
    assert deployment.log.read_text().count('"event": "worker_reaped"') == 6


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
