"""Law 7 for every strategy of choosing tokens, between real processes: with a decode worker drained
or killed in mid-stream, a client receives bit by bit what it receives without any disturbance. All
strategies run at once. The gateway's log tells what happened to each request."""

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from quire.async_client import AsyncClient
from quire.messages import Request
from quire.types import Delta, Sampling, Worker
from tests.exactness import SEED, Answer, is_streamed, strategies, width
from tests.waiting import until

from .conftest import BLOCK_BYTES, STAMP_BYTES
from .decoders import decoders, pid_of, until_two_serve
from .deployment import Deployment, serving
from .quiet import quiet

NUM_TOKENS = 300
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
    """The deployment has room for all requests, and does not rebalance them."""
    folder = tmp_path_factory.mktemp("run")
    options = ("--decode", "2", "--pool-memory", pool_of(8192))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("QUIRE_GATEWAY_REBALANCE_S", "0")
        with serving(checkpoint, folder, *options) as running:
            yield running


@pytest.fixture(scope="module")
def undisturbed(deployment: Deployment) -> Answers:
    async def answers() -> Answers:
        async with AsyncClient(deployment.address) as client:
            return await Run(client, "undisturbed", STRATEGIES).answers()

    return asyncio.run(answers())


def asked(run: str, name: str) -> Request:
    """The request of a strategy. Each run has its own cache salt."""
    return Request(
        prompt(list(STRATEGIES).index(name)),
        STRATEGIES[name],
        request_id=f"{run}: {name}",
        cache_salt=f"{run}: {name}",
    )


class Call:
    """A streamed request. `deltas`: all that the client has received."""

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
        await until(lambda: self.num_tokens >= num_tokens or self.reading.done())


class Run:
    """Requests of several strategies that run at once."""

    def __init__(self, client: AsyncClient, name: str, strategies: Iterable[str]) -> None:
        self.name = name
        self.calls = {each: Call(client, asked(name, each)) for each in strategies}

    async def has_begun(self) -> None:
        """Wait until each streamed request has tokens."""
        for name, call in self.calls.items():
            if is_streamed(STRATEGIES[name]):
                await call.has(2 * width(STRATEGIES[name]))

    async def answers(self) -> Answers:
        await asyncio.gather(*(call.reading for call in self.calls.values()))
        return {name: Answer.of(call.deltas) for name, call in self.calls.items()}

    async def ends(self, deployment: Deployment) -> dict[str, dict[str, Any]]:
        """The gateway's log line of each request's end, by strategy."""
        ids = {f"{self.name}: {name}": name for name in self.calls}

        def logged() -> dict[str, dict[str, Any]]:
            lines = deployment.log.read_text().splitlines()
            events = [json.loads(line) for line in lines if '"request_ended"' in line]
            return {ids[e["request_id"]]: e for e in events if e["request_id"] in ids}

        return await until(logged, lambda ends: len(ends) == len(ids))


@asynccontextmanager
async def filled(client: AsyncClient, sampling: Sampling) -> AsyncIterator[None]:
    """Another request runs within the block."""
    call = Call(client, Request(prompt(100, 16), sampling))
    try:
        yield
    finally:
        call.reading.cancel()
        await asyncio.wait([call.reading])


def filler(num_tokens: int, n: int = 1) -> Sampling:
    return Sampling(n=n, seed=SEED + 1, max_tokens=num_tokens, ignore_eos=True)


async def until_all(
    deployment: Deployment,
    client: AsyncClient,
    undisturbed: Answers,
    name: str,
    happens: Callable[[Worker], Awaitable[object]],
    came_about: Callable[[Any], bool],
) -> None:
    """Run all strategies, and disturb the decode worker with the most room, to which all of them
    go. Repeat it with the strategies that ended before the disturbance, until each has met it."""
    left, numbers = set(STRATEGIES), count()
    async with asyncio.timeout(LIMIT_S):
        while left:
            await until_two_serve(client)
            await quiet(client)
            async with filled(client, filler(3000, n=24)):
                other = await idle_one(client)
                run = Run(client, f"{name} {next(numbers)}", strategies=left)
                await run.has_begun()
                await happens(other)
                answers = await run.answers()
            assert [name for name in answers if answers[name] != undisturbed[name]] == []
            ends = await run.ends(deployment)
            left -= {each for each, end in ends.items() if came_about(end)}
        await quiet(client)


async def idle_one(client: AsyncClient) -> Worker:
    """The only idle decode worker, once the gateway knows that the other one is busy."""

    async def idle() -> list[Worker]:
        return [worker for worker in await decoders(client) if not worker.num_running]

    (one,) = await until(idle, lambda workers: len(workers) == 1)
    return one


async def test_tokens_are_exact_when_the_worker_is_drained(
    deployment: Deployment, client: AsyncClient, undisturbed: Answers
) -> None:
    async def happens(leaving: Worker) -> None:
        await client.drain(leaving.worker_id)

    def came_about(end: Any) -> bool:
        return (end["num_moves"], end["num_preemptions"]) == (1, 0)

    await until_all(deployment, client, undisturbed, "drained", happens, came_about)


async def test_tokens_are_exact_when_the_worker_is_killed(
    deployment: Deployment, client: AsyncClient, undisturbed: Answers
) -> None:
    async def happens(dying: Worker) -> None:
        os.kill(pid_of(deployment, dying), signal.SIGKILL)

    def came_about(end: Any) -> bool:
        return end["num_attempts"] == 2 and not end["num_moves"] and not end["num_preemptions"]

    await until_all(deployment, client, undisturbed, "killed", happens, came_about)
