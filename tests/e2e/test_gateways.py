"""A deployment with two gateways: one may be killed, and no stream notices."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.client import AsyncClient
from quire.types import Sampling

from .conftest import Oracle
from .deployment import Deployment, serving
from .quiet import quiet

PROMPT = list(range(260, 300))
NUM_TOKENS = 200
GREEDY = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = Sampling(temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=7)


@pytest.fixture(scope="module")
def deployment(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("run")
    with serving(checkpoint, folder, "--pool-memory", "16MiB", num_gateways=2) as running:
        yield running


async def test_streams_outlive_their_gateway(deployment: Deployment, oracle: Oracle) -> None:
    """Greedy and sampled, each token as if nothing had happened; afterwards nothing is held."""
    started = asyncio.Semaphore(0)

    async def stream(client: AsyncClient, sampling: Sampling) -> list[int]:
        tokens: list[int] = []
        async for delta in client.generate(PROMPT, sampling, timeout_s=60.0):
            tokens += delta.token_ids
            started.release()
        return tokens

    async with AsyncClient(deployment.address) as client, asyncio.timeout(90):
        undisturbed = await stream(client, SAMPLED)
        started = asyncio.Semaphore(0)
        streams = [
            asyncio.create_task(stream(client, sampling))
            for sampling in (GREEDY, SAMPLED)
            for _ in range(8)
        ]
        for _ in streams:
            await started.acquire()
        os.kill(deployment.gateway(client.address), signal.SIGKILL)
        results = await asyncio.gather(*streams)
        assert results[:8] == [oracle.greedy(PROMPT, NUM_TOKENS)] * 8
        assert results[8:] == [undisturbed] * 8
        await quiet(client, 8.0)  # sooner than the window closes: nothing stayed parked
