"""Workers of two ranks each: tokens are those of transformers, a rank that dies is only a pause,
and new weights are served by new ranks."""

import asyncio
import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from bench.make_checkpoint import make_checkpoint
from quire.async_client import AsyncClient
from quire.errors import InvalidRequest
from quire.types import Sampling
from tests.waiting import until

from .conftest import POOL_MEMORY, Oracle
from .deployment import Deployment, serving
from .quiet import quiet
from .test_crashes import LIMIT_S, is_whole, streams
from .weights import WEIGHTS, other_bytes, point

RANKS = "services.worker.ranks"


@pytest.fixture(scope="module")
def deployment(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """1 prefill and 2 decode workers of two ranks each, with an arena for each rank as on a GPU."""
    options = ("--decode", "2", "--tensor-parallel-size", "2")
    device = ("--device", "memfd:0,memfd:2")
    memory = ("--pool-memory", str(2 * POOL_MEMORY))
    folder = tmp_path_factory.mktemp("run")
    (folder / "model").symlink_to(checkpoint)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_DECODE_STEP_LIMIT_S", "5")
        with serving(folder / "model", folder, *options, *device, *memory) as running:
            yield running
    assert not [line for line in running.log.read_text().splitlines() if "kv_corrupt" in line]


async def all_serve(client: AsyncClient) -> None:
    await until(lambda: is_whole(client, prefill=1, decode=2), limit_s=LIMIT_S)


async def test_greedy_tokens_are_those_of_transformers(
    deployment: Deployment, client: AsyncClient, oracle: Oracle
) -> None:
    """Prefill and decode on separate workers, several samples of a prompt, and a cached prefix."""
    await all_serve(client)
    engines = [worker.engine for worker in await client.workers()]
    assert {engine["tensor_parallel_size"] for engine in engines} == {"2"}
    assert {engine["device"] for engine in engines} == {"memfd:0,memfd:2"}
    prompt = [300 + number % 80 for number in range(50)]
    sampling = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
    wanted = oracle.greedy(prompt, 40)
    for _ in range(2):
        assert list((await client.complete(prompt, sampling)).token_ids) == wanted
    usage = (await client.complete(prompt, sampling)).usage
    assert usage.num_cached_tokens == 48
    many = Sampling(temperature=1.0, seed=3, n=4, max_tokens=40, ignore_eos=True)
    first, second = [await client.complete(prompt, many) for _ in range(2)]
    assert first.choices == second.choices


async def test_a_stopped_rank_ends_its_worker_within_the_step_limit(
    deployment: Deployment, client: AsyncClient, oracle: Oracle
) -> None:
    """The worker hangs in an exchange between ranks, and its requests continue elsewhere."""
    await all_serve(client)
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


async def test_new_weights_are_served_by_new_ranks(
    deployment: Deployment, client: AsyncClient, oracle: Oracle, tmp_path: Path
) -> None:
    """A request that runs meanwhile is whole. Weights that a rank cannot read change nothing. The
    old ranks, and the memory of their shards, are gone."""
    await all_serve(client)
    link, ranks = deployment.log.parent / "model", set(deployment.running(RANKS))
    pids = {worker.pid for worker in await client.workers()}
    prompt = [300 + number % 80 for number in range(50)]
    sampling = Sampling(temperature=0.0, max_tokens=40, ignore_eos=True)
    cut = other_bytes(link.resolve(), tmp_path / "cut")
    os.truncate(cut / WEIGHTS, 1000)
    point(link, cut)
    with pytest.raises(InvalidRequest, match=WEIGHTS):
        await client.reload()
    await until(lambda: set(deployment.running(RANKS)) == ranks)  # another worker still reads
    assert list((await client.complete(prompt, sampling)).token_ids) == oracle.greedy(prompt, 40)
    point(link, new := make_checkpoint(tmp_path / "new", seed=1))
    running = asyncio.create_task(client.complete(prompt, replace(sampling, max_tokens=300)))
    assert len(await client.reload()) == 3
    assert len((await running).token_ids) == 300
    assert list((await client.complete(prompt, sampling)).token_ids) == Oracle(new).greedy(
        prompt, 40
    )
    assert {worker.pid for worker in await client.workers()} == pids
    now = set(deployment.running(RANKS))
    assert (len(now), now & ranks) == (3, set())
    await quiet(client)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
