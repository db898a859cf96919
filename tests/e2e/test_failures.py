"""Processes are killed: nothing hangs, no wrong token is served, and the deployment recovers by
itself."""

import asyncio
import os
import signal

import pytest

from quire.async_client import AsyncClient
from quire.errors import QuireError
from quire.types import Sampling
from tests.waiting import until

from .conftest import Oracle
from .deployment import Deployment, deploying
from .quiet import quiet

RECOVERY_LIMIT_S = 60.0
"""The limit on a busy machine; docs/benchmarks/store-and-recovery.md has the times of a quiet one.
A ticket that was claimed and finished may return with a recovered ledger as its issuer's, for 30
s."""

PROMPT = list(range(260, 300))
GREEDY = Sampling(temperature=0.0, max_tokens=200, ignore_eos=True)


deployment = deploying("--pool-memory", "16MiB")


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> list[int]:
    return oracle.greedy(PROMPT, 200)


async def recovered(client: AsyncClient, expected: list[int]) -> None:
    """Wait, within the limit, until a request gets the right answer."""
    completion = await until(
        lambda: client.complete(PROMPT, GREEDY, timeout_s=5.0),
        limit_s=RECOVERY_LIMIT_S,
        not_yet=(QuireError,),
    )
    assert list(completion.token_ids) == expected


@pytest.mark.parametrize(
    "victim",
    [
        *("--role=prefill", "services.gateway", "valkey"),
        pytest.param("--role=decode", marks=pytest.mark.full),
        pytest.param("services.block_manager", marks=pytest.mark.full),
    ],
)
async def test_a_killed_process_comes_back(
    deployment: Deployment, client: AsyncClient, expected: list[int], victim: str
) -> None:
    """Running streams may fail; the tokens that they sent before are right."""
    await recovered(client, expected)

    async def stream() -> list[int]:
        tokens: list[int] = []
        try:
            async for delta in client.generate(PROMPT, GREEDY, timeout_s=30.0):
                tokens += delta.token_ids
        except QuireError:
            pass
        return tokens

    streams = [asyncio.create_task(stream()) for _ in range(8)]
    await asyncio.sleep(0.05)  # somewhere in the middle
    for pid in deployment.running(victim):
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(RECOVERY_LIMIT_S):
        for tokens in await asyncio.gather(*streams):
            assert tokens == expected[: len(tokens)]
    await recovered(client, expected)
    await quiet(client, RECOVERY_LIMIT_S)
