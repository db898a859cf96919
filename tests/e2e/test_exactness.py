"""Law 7, every way of choosing tokens, between real processes: in a full batch, with a cached
prompt, drained and killed in the middle, a client is told to the bit what it is told alone. All
strategies at once; of each request the gateway says what became of it."""

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from quire.client import AsyncClient, Client
from quire.messages import Request
from quire.types import Delta, Sampling, Worker
from tests.exactness import SEED, Answer, is_streamed, strategies, width

from .conftest import BLOCK_BYTES, STAMP_BYTES
from .decoders import decoders, pid_of
from .deployment import Deployment, serving
from .quiet import quiet

NUM_TOKENS = 400
NUM_SLOTS = 64
STRATEGIES = strategies(NUM_TOKENS)
LIMIT_S = 90.0

Answers = dict[str, Answer]


def pool_of(num_blocks: int) -> str:
    return str(num_blocks * (BLOCK_BYTES + STAMP_BYTES))


def prompt(number: int, length: int = 40) -> list[int]:
    chance = random.Random(number)
    return [chance.randrange(259, 384) for _ in range(length)]


@pytest.fixture(scope="module")
def deployment(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """It moves nobody by itself, and has room for all."""
    folder = tmp_path_factory.mktemp("run")
    options = ("--decode", "2", "--pool-memory", pool_of(8192))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("QUIRE_GATEWAY_REBALANCE_S", "0")
        with serving(checkpoint, folder, *options) as running:
            yield running


@pytest.fixture(scope="module")
def alone(deployment: Deployment) -> Answers:
    """One after the other, each with nothing cached."""
    with Client(deployment.address) as client:
        return {
            name: Answer.of(list(client.send(asked("alone", name), LIMIT_S))) for name in STRATEGIES
        }


def asked(run: str, name: str, salt: str = "") -> Request:
    """Prompts of a run are cached under its own salt."""
    return Request(
        prompt(list(STRATEGIES).index(name)),
        STRATEGIES[name],
        request_id=f"{run}: {name}",
        cache_salt=salt or f"{run}: {name}",
    )


class Call:
    """`deltas`: what its client has by now."""

    def __init__(self, client: AsyncClient, request: Request) -> None:
        self.deltas: list[Delta] = []
        self.reading = asyncio.create_task(self._read(client, request))

    async def _read(self, client: AsyncClient, request: Request) -> None:
        async for delta in client.send(request, LIMIT_S):
            self.deltas.append(delta)

    @property
    def num_tokens(self) -> int:
        return sum(len(delta.token_ids) for delta in self.deltas)

    async def has(self, num_tokens: int) -> None:
        while self.num_tokens < num_tokens:
            assert not self.reading.done(), self.reading.exception()
            await asyncio.sleep(0.005)


class Run:
    """All strategies at once, the widest first: it needs its slots at one worker."""

    def __init__(self, client: AsyncClient, name: str, salt: str = "") -> None:
        widest_first = sorted(STRATEGIES, key=lambda each: -width(STRATEGIES[each]))
        self.name = name
        self.calls = {each: Call(client, asked(name, each, salt)) for each in widest_first}

    async def has_begun(self) -> None:
        """All that are streamed have tokens, and none has ended."""
        for name, call in self.calls.items():
            if is_streamed(STRATEGIES[name]):
                await call.has(2 * width(STRATEGIES[name]))
        assert not any(call.reading.done() for call in self.calls.values())

    async def check(self, alone: Answers) -> Answers:
        await asyncio.gather(*(call.reading for call in self.calls.values()))
        answers = {name: Answer.of(call.deltas) for name, call in self.calls.items()}
        assert [name for name in STRATEGIES if answers[name] != alone[name]] == []
        return answers

    async def ends(self, deployment: Deployment) -> dict[str, dict[str, Any]]:
        """What the gateway writes of each request when it ends."""
        ids = {f"{self.name}: {name}": name for name in STRATEGIES}
        while True:
            lines = deployment.log.read_text().splitlines()
            events = [json.loads(line) for line in lines if '"request_ended"' in line]
            ends = {ids[e["request_id"]]: e for e in events if e["request_id"] in ids}
            if len(ends) == len(ids):
                return ends
            await asyncio.sleep(0.05)


@asynccontextmanager
async def filled(client: AsyncClient, samplings: Sequence[Sampling]) -> AsyncIterator[list[Call]]:
    """Other requests, until the block is left."""
    requests = [Request(prompt(100 + n, 16), each) for n, each in enumerate(samplings)]
    fillers = [Call(client, request) for request in requests]
    try:
        yield fillers
    finally:
        for one in fillers:
            one.reading.cancel()
        await asyncio.gather(*(one.reading for one in fillers), return_exceptions=True)


def filler(num_tokens: int, n: int = 1) -> Sampling:
    return Sampling(n=n, seed=SEED + 1, max_tokens=num_tokens, ignore_eos=True)


async def test_in_a_full_batch(deployment: Deployment, client: AsyncClient, alone: Answers) -> None:
    """Both decode workers run as many sequences as they can."""
    num_sequences = sum(map(width, STRATEGIES.values()))
    async with asyncio.timeout(LIMIT_S):
        await two_decoders(client)
        async with filled(client, [filler(3000)] * (2 * NUM_SLOTS - num_sequences)) as fillers:
            while sum(worker.num_free_slots for worker in await decoders(client)) > num_sequences:
                await asyncio.sleep(0.02)
            run = Run(client, "batch")
            await run.has_begun()
            await run.check(alone)
            assert not any(one.reading.done() for one in fillers)
        ends = await run.ends(deployment)
        assert {end["num_attempts"] for end in ends.values()} == {1}
        await quiet(client)


async def test_with_cached_prompts(client: AsyncClient, alone: Answers) -> None:
    async with asyncio.timeout(LIMIT_S):
        await Run(client, "cold", salt="cached").check(alone)
        before = await prefix_hits(client)
        answers = await Run(client, "cached", salt="cached").check(alone)
        num_blocks = len(prompt(0)) // 16 * len(STRATEGIES)
        assert await prefix_hits(client) - before == num_blocks
        for name, answer in answers.items():
            tells_prompt = STRATEGIES[name].prompt_logprobs is not None  # which it has to compute
            assert (answer.usage.num_cached_tokens > 0) != tells_prompt
        await quiet(client)


async def prefix_hits(client: AsyncClient) -> int:
    (pool,) = await client.pools()
    return pool.num_prefix_hits


async def two_decoders(client: AsyncClient) -> None:
    while [worker.state for worker in await decoders(client)] != ["serving"] * 2:
        await client.scale(num_decode=2)
        await asyncio.sleep(0.05)
    await quiet(client)


@asynccontextmanager
async def on_one_worker(client: AsyncClient, name: str) -> AsyncIterator[tuple[Run, Worker]]:
    """All run where there is most room, and have begun: on the one that has no filler."""
    async with asyncio.timeout(LIMIT_S):
        await two_decoders(client)
        async with filled(client, [filler(3000, n=24)]):
            while not (there := [w for w in await decoders(client) if w.num_running]):
                await asyncio.sleep(0.02)
            (other,) = [
                w for w in await decoders(client) if w.worker_id not in {w.worker_id for w in there}
            ]
            run = Run(client, name)
            await run.has_begun()
            yield run, other
        await quiet(client)


async def test_when_their_worker_is_drained(
    deployment: Deployment, client: AsyncClient, alone: Answers
) -> None:
    async with on_one_worker(client, "drained") as (run, leaving):
        await client.drain(leaving.worker_id)
        await run.check(alone)
        for name, end in (await run.ends(deployment)).items():
            assert (end["num_moves"], end["num_preemptions"]) == (1, 0), name


async def test_when_their_worker_is_killed(
    deployment: Deployment, client: AsyncClient, alone: Answers
) -> None:
    async with on_one_worker(client, "killed") as (run, dying):
        os.kill(pid_of(deployment, dying), signal.SIGKILL)
        await run.check(alone)
        for name, end in (await run.ends(deployment)).items():
            assert (end["num_attempts"], end["num_moves"], end["num_preemptions"]) == (2, 0, 0), (
                name
            )
