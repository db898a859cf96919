"""Two models in one deployment: each has its own pool and workers, and does not depend on the
other's."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from bench.make_checkpoint import make_checkpoint
from quire.async_client import AsyncClient
from quire.types import Sampling

from .conftest import Oracle
from .deployment import Deployment, serving

PROMPT = (5, 6, 7, 8, 9)
LONG = Sampling(temperature=0, max_tokens=400, ignore_eos=True)
SHORT = Sampling(temperature=0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "one": make_checkpoint(root / "one", seed=1),
        "two": make_checkpoint(root / "two", seed=2, num_layers=3),
    }


@pytest.fixture(scope="module")
def oracles(checkpoints: dict[str, Path]) -> dict[str, Oracle]:
    return {name: Oracle(path) for name, path in checkpoints.items()}


@pytest.fixture(scope="module")
def deployment(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    models = [f"one,default={checkpoints['one']}", f"two={checkpoints['two']}"]
    flags = ("--pool-memory", "4MiB", "--set", "two.decode=2")
    with serving(models, tmp_path_factory.mktemp("run"), *flags) as running:
        yield running


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(deployment.address, operations=deployment.operations) as client:
        yield client


async def tokens(client: AsyncClient, model: str, sampling: Sampling) -> list[int]:
    found: list[int] = []
    async for delta in client.generate(PROMPT, sampling, model=model):
        found += delta.token_ids
    return found


async def test_each_model_answers_as_transformers_do(
    client: AsyncClient, oracles: dict[str, Oracle]
) -> None:
    names = ["one", "two", "default"]
    answers = await asyncio.gather(*(tokens(client, name, SHORT) for name in names))
    one, two = (oracle.greedy(PROMPT, 24) for oracle in oracles.values())
    assert answers == [one, two, one]
    assert one != two


async def test_workers_of_one_model_die_and_the_other_does_not_notice(
    client: AsyncClient, deployment: Deployment, oracles: dict[str, Oracle]
) -> None:
    """The streams of the second model get no error, and the first model's requests recover."""
    running = [asyncio.create_task(tokens(client, name, LONG)) for name in ("one", "two")]
    before = {w.worker_id: w.started_unix_ms for w in await client.workers() if w.model == "two"}
    for pid in pids_of(deployment, "one"):
        os.kill(pid, signal.SIGKILL)
    assert await tokens(client, "two", SHORT) == oracles["two"].greedy(PROMPT, 24)
    one, two = await asyncio.gather(*running)
    assert (one, two) == tuple(oracle.greedy(PROMPT, 400) for oracle in oracles.values())
    after = {w.worker_id: w.started_unix_ms for w in await client.workers() if w.model == "two"}
    assert after == before


def pids_of(deployment: Deployment, model: str) -> list[int]:
    """Pids of the model's workers."""
    pids = deployment.running("--role=(prefill|decode)")
    entry = f"MODEL_NAME={model}\0".encode()
    found = [pid for pid in pids if entry in Path(f"/proc/{pid}/environ").read_bytes()]
    assert len(found) == 2
    return found
