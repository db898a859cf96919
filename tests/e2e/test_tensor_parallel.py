"""Workers of two ranks each: tokens are those of transformers, and a rank that dies is only a
pause."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.async_client import AsyncClient
from quire.types import Sampling
from tests.adapters import AdapterOracle, make_adapter
from tests.waiting import until

from .conftest import POOL_MEMORY, Oracle
from .deployment import Deployment, serving
from .test_crashes import LIMIT_S, all_serve, streams

RANKS = "services.worker.ranks"


@pytest.fixture(scope="module")
def adapter(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_adapter(tmp_path_factory.mktemp("adapter") / "poet", checkpoint, 1)


@pytest.fixture(scope="module")
def deployment(
    checkpoint: Path, adapter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    """Two workers of each kind, of two ranks each, with an arena for each rank as on a GPU."""
    options = ("--prefill", "2", "--decode", "2", "--tensor-parallel-size", "2")
    device = ("--device", "memfd:0,memfd:2")
    memory = ("--pool-memory", str(2 * POOL_MEMORY))
    folder = tmp_path_factory.mktemp("run")
    lora = ("--lora", f"poet={adapter}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_DECODE_STEP_LIMIT_S", "5")
        with serving(checkpoint, folder, *options, *device, *memory, *lora) as running:
            yield running
    assert not [line for line in running.log.read_text().splitlines() if "kv_corrupt" in line]


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


async def test_an_adapter_beside_the_model(
    deployment: Deployment, client: AsyncClient, checkpoint: Path, adapter: Path
) -> None:
    """Requests for both run together; tokens are those of transformers and PEFT."""
    await all_serve(client)
    prompt = [300 + number % 80 for number in range(50)]
    greedy = Sampling(temperature=0.0, max_tokens=20, ignore_eos=True)
    names = ("poet", None, "poet")
    found = await asyncio.gather(
        *(client.complete(prompt, greedy, model=name or "") for name in names)
    )
    poet, alone = (
        AdapterOracle(checkpoint, one).greedy(tuple(prompt), 20)[0] for one in (adapter, None)
    )
    assert [list(one.token_ids) for one in found] == [poet, alone, poet]
    assert poet != alone


@pytest.mark.parametrize(
    "victim",
    [
        RANKS,
        pytest.param("--role=decode", marks=pytest.mark.full),
        pytest.param("--role=prefill", marks=pytest.mark.full),
        pytest.param("services.block_manager", marks=pytest.mark.full),
    ],
)
async def test_a_killed_rank_only_delays_streams(
    deployment: Deployment, client: AsyncClient, victim: str
) -> None:
    """Every token is that of the undisturbed run. No other rank of the worker is left. The block
    manager, which keeps the memory of all ranks, may be killed, too."""
    await all_serve(client)
    undisturbed = [await stream.run(client) for stream in streams(1)]
    disturbed = streams(1)
    running = [asyncio.create_task(stream.run(client)) for stream in disturbed]
    await disturbed[0].reaches(40)
    before = set(deployment.running(RANKS))
    os.kill(deployment.running(victim)[-1], signal.SIGKILL)
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.gather(*running) == undisturbed
    num_kept = 4 if victim == "services.block_manager" else 3

    def is_replaced() -> bool:
        after = set(deployment.running(RANKS))
        return (len(after), len(before & after)) == (4, num_kept)

    # The streams may have been at the other worker: then nobody has noticed the death yet.
    await until(is_replaced, limit_s=LIMIT_S)
    await all_serve(client)
    assert is_replaced()


async def test_a_stopped_rank_ends_its_worker_within_the_step_limit(
    deployment: Deployment, client: AsyncClient, oracle: Oracle
) -> None:
    """The worker hangs in an exchange between ranks, and its requests continue elsewhere."""
    await all_serve(client)
    undisturbed = [await stream.run(client) for stream in streams(2)]
    for stream, tokens in zip(streams(2), undisturbed, strict=True):
        if stream.sampling.temperature == 0:
            assert oracle.choices(stream.prompt, tokens) == tokens
    disturbed = streams(2)
    running = [asyncio.create_task(stream.run(client)) for stream in disturbed]
    await disturbed[0].reaches(40)
    decoder = deployment.running("--role=decode")[0]
    (stopped,) = (pid for pid in deployment.running(RANKS) if parent_of(pid) == decoder)
    os.kill(stopped, signal.SIGSTOP)
    async with asyncio.timeout(LIMIT_S):
        assert await asyncio.gather(*running) == undisturbed
    await until(lambda: stopped not in deployment.children(), limit_s=LIMIT_S)
    await all_serve(client)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
