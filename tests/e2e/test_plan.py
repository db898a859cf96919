"""`quire plan`: a load that needs more decode workers gets them, and its streams lose no token."""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.async_client import AsyncClient
from quire.types import Sampling
from tests.waiting import until

from .conftest import Oracle
from .deployment import Deployment, serving

NUM_SLOTS, NUM_STREAMS, NUM_TOKENS, LIMIT_S = 4, 12, 2000, 120.0
GREEDY = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [list(range(260 + number, 290 + number)) for number in range(NUM_STREAMS)]


@pytest.fixture
def deployment(checkpoint: Path, tmp_path: Path) -> Iterator[Deployment]:
    workers = ("--prefill", "2", "--decode", "1", "--max-num-seqs", str(NUM_SLOTS))
    with serving(checkpoint, tmp_path, *workers, "--pool-memory", "16MiB") as running:
        yield running


async def plan(deployment: Deployment, *flags: str) -> dict[str, dict[str, object]]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "quire.cli", "plan", "--json", "--window", "1"),
        *("--address", deployment.operations, *flags),
        stdout=asyncio.subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    return {row["role"]: row for row in json.loads(output)}


async def numbers(client: AsyncClient) -> dict[str, int]:
    workers = [worker for worker in await client.workers() if worker.state == "serving"]
    return {role: sum(worker.role == role for worker in workers) for role in ("prefill", "decode")}


async def test_a_worker_changes_its_role_under_streams(
    deployment: Deployment, client: AsyncClient, oracle: Oracle
) -> None:
    """An idle deployment needs one worker of each role. When all slots are used, 2 of 3 workers
    decode."""
    tokens: list[list[int]] = [[] for _ in PROMPTS]

    async def stream(number: int) -> None:
        async for delta in client.generate(PROMPTS[number], GREEDY, timeout_s=LIMIT_S):
            tokens[number] += delta.token_ids

    async with asyncio.timeout(LIMIT_S):
        await until(lambda: numbers(client), lambda now: now == {"prefill": 2, "decode": 1})
        idle = await plan(deployment, "--window", "0")
        assert [row["recommended"] for row in idle.values()] == [1, 1]
        streams = [asyncio.create_task(stream(number)) for number in range(NUM_STREAMS)]
        await until(lambda: sum(map(bool, tokens)) >= NUM_SLOTS)
        planned = await plan(deployment, "--total", "3", "--apply")
        assert f"of {NUM_SLOTS} slots" in str(planned["decode"]["reason"])
        assert (planned["prefill"]["recommended"], planned["decode"]["recommended"]) == (1, 2)
        await asyncio.gather(*streams)
        await until(lambda: numbers(client), lambda now: now == {"prefill": 1, "decode": 2})
    for prompt, found in zip(PROMPTS, tokens, strict=True):
        assert len(found) == NUM_TOKENS
        assert found == oracle.choices(prompt, found)
