"""A deployment with two gateways: when one is killed, every stream goes on."""

import asyncio
import os
import signal

from quire.async_client import AsyncClient
from quire.types import Sampling

from .conftest import Oracle
from .deployment import Deployment, deploying
from .quiet import quiet

PROMPT = list(range(260, 300))
NUM_TOKENS = 200
LONG = 1000
GREEDY = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SAMPLED = Sampling(temperature=1.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=7)


deployment = deploying("--pool-memory", "16MiB", num_gateways=2)


async def test_streams_outlive_their_gateway(deployment: Deployment, oracle: Oracle) -> None:
    """Greedy and sampled streams get every token of an undisturbed run; afterwards nothing is
    held."""
    started = asyncio.Semaphore(0)

    async def stream(client: AsyncClient, sampling: Sampling) -> list[int]:
        tokens: list[int] = []
        async for delta in client.generate(PROMPT, sampling, timeout_s=60.0):
            tokens += delta.token_ids
            started.release()
        return tokens

    async with (
        AsyncClient(deployment.address, operations=deployment.operations) as client,
        asyncio.timeout(90),
    ):
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
