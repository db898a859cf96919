"""A decode worker is drained while it runs: its streams continue at another one, and nothing is
computed again."""

import asyncio
import os
import random
import signal
from functools import partial
from operator import eq

import pytest

from quire.async_client import AsyncClient
from quire.types import Sampling
from tests.waiting import until

from .conftest import Oracle
from .decoders import (
    busiest,
    decoder_states,
    decoders,
    figures,
    pid_of,
    until_left,
    until_two_serve,
)
from .deployment import Deployment

NUM_STREAMS, NUM_TOKENS = 6, 1000
LIMIT_S = 60.0
SAMPLINGS = (
    Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
    Sampling(temperature=1.0, seed=7, max_tokens=NUM_TOKENS, ignore_eos=True),
)


@pytest.fixture(scope="module")
def deployment(roomy: Deployment) -> Deployment:
    return roomy


class Stream:
    def __init__(self, client: AsyncClient, number: int) -> None:
        prompt = [random.Random(number).randrange(259, 384) for _ in range(30 + number)]
        self.prompt, self.sampling = prompt, SAMPLINGS[number % 2]
        self.tokens: list[int] = []
        self.reading = asyncio.create_task(self._read(client))

    async def _read(self, client: AsyncClient) -> None:
        async for delta in client.generate(self.prompt, self.sampling, timeout_s=LIMIT_S):
            self.tokens += delta.token_ids


@pytest.mark.parametrize("way", ["drained", pytest.param("terminated", marks=pytest.mark.full)])
async def test_a_worker_leaves_while_its_streams_go_on(
    deployment: Deployment, client: AsyncClient, oracle: Oracle, way: str
) -> None:
    async with asyncio.timeout(LIMIT_S):
        await until_two_serve(client)
        before = await figures(deployment, "num_moves", "num_preemptions")
        streams = [Stream(client, number) for number in range(NUM_STREAMS)]
        await until(lambda: all(stream.tokens for stream in streams))
        leaving = await busiest(deployment, client)
        if way == "drained":
            await client.drain(leaving.worker_id)
        else:
            os.kill(pid_of(deployment, leaving), signal.SIGTERM)
        await until_left(client, leaving)
        await asyncio.gather(*(stream.reading for stream in streams))
    for stream in streams:
        again = await client.complete(stream.prompt, stream.sampling)
        assert stream.tokens == list(again.token_ids)
        if stream.sampling.temperature == 0:
            assert stream.tokens == oracle.choices(stream.prompt, stream.tokens)
    assert_only_moved(before, await figures(deployment, "num_moves", "num_preemptions"))


def assert_only_moved(before: list[float], after: list[float]) -> None:
    (num_moves_before, num_preemptions), (num_moves, num_preemptions_now) = before, after
    assert num_moves > num_moves_before
    assert num_preemptions_now == num_preemptions


async def test_workers_come_and_go_under_load(
    deployment: Deployment, client: AsyncClient, oracle: Oracle
) -> None:
    """The deployment scales from 2 decode workers to 3, and then to 1, which takes all streams."""
    async with asyncio.timeout(LIMIT_S):
        await until_two_serve(client)
        before = await figures(deployment, "num_moves", "num_preemptions")
        for number in (3, 1):
            streams = [Stream(client, number) for number in range(2 * NUM_STREAMS)]
            await until(lambda: decoders(client), lambda now: all(w.num_running for w in now))
            scaled = await client.scale(num_decode=number)
            assert scaled.num_decode == number
            await until(lambda: decoder_states(client), partial(eq, ["serving"] * number))
            await asyncio.gather(*(stream.reading for stream in streams))
            assert all(len(stream.tokens) == NUM_TOKENS for stream in streams)
    for stream in streams[:4]:
        again = await client.complete(stream.prompt, stream.sampling)
        assert stream.tokens == list(again.token_ids)
    assert_only_moved(before, await figures(deployment, "num_moves", "num_preemptions"))
    assert not any(audit.violations for audit in await client.audit())
