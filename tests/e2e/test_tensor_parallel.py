"""Workers of two ranks each: tokens are those of transformers, and a rank that hangs is only a
pause."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.async_client import AsyncClient
from tests.waiting import until

from .conftest import POOL_MEMORY, Oracle
from .deployment import Deployment, serving
from .test_crashes import LIMIT_S, is_whole, streams

RANKS = "services.worker.ranks"


@pytest.fixture(scope="module")
def deployment(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """1 prefill and 2 decode workers of two ranks each, with an arena for each rank as on a GPU."""
    options = ("--decode", "2", "--tensor-parallel-size", "2")
    device = ("--device", "memfd:0,memfd:2")
    memory = ("--pool-memory", str(2 * POOL_MEMORY))
    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_DECODE_STEP_LIMIT_S", "5")
        with serving(checkpoint, folder, *options, *device, *memory) as running:
            yield running
    assert not [line for line in running.log.read_text().splitlines() if "kv_corrupt" in line]


async def all_serve(client: AsyncClient) -> None:
    await until(lambda: is_whole(client, prefill=1, decode=2), limit_s=LIMIT_S)


async def test_a_stopped_rank_ends_its_worker_within_the_step_limit(
    deployment: Deployment, client: AsyncClient, oracle: Oracle
) -> None:
    """The worker hangs in an exchange between ranks, and its requests continue elsewhere."""
    await all_serve(client)
    engines = [worker.engine for worker in await client.workers()]
    assert {engine["device"] for engine in engines} == {"memfd:0,memfd:2"}
    undisturbed = await asyncio.gather(*(stream.run(client) for stream in streams(2)))
    for stream, tokens in zip(streams(2), undisturbed, strict=True):
        if stream.sampling.temperature == 0:
            assert oracle.choices(stream.prompt, tokens) == tokens
    disturbed = streams(2)
    running = [asyncio.create_task(stream.run(client)) for stream in disturbed]
    await disturbed[0].reaches(40)
    decoder = deployment.running("--role=decode")[0]
    (stopped,) = (pid for pid in deployment.running(RANKS) if parent_of(pid) == decoder)
    before = set(deployment.running(RANKS))
    os.kill(stopped, signal.SIGSTOP)
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.gather(*running) == undisturbed
    await until(lambda: stopped not in deployment.children(), limit_s=LIMIT_S)
    await all_serve(client)
    assert len(set(deployment.running(RANKS)) - before) == 1


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
