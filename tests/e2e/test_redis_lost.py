"""Redis is killed, emptied, away for a while, or returns with old data: streams go on, all tokens
are right, no process ends, and the prefix cache survives."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import redis

from quire.async_client import AsyncClient
from quire.errors import QuireError
from quire.types import Sampling
from tests.waiting import until

from .conftest import Oracle
from .deployment import Deployment
from .quiet import quiet

LIMIT_S = 60.0
NUM_STREAMS = 8
PROMPTS = [list(range(260 + number, 300 + number)) for number in range(NUM_STREAMS)]
NUM_TOKENS = 400
GREEDY = Sampling(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
SERVICES = ("--role=prefill", "--role=decode", "services.gateway", "services.block_manager")


@pytest.fixture(scope="module")
def deployment(pairs: Deployment) -> Deployment:
    return pairs


@pytest.fixture(scope="module")
def expected(oracle: Oracle) -> list[list[int]]:
    return oracle.greedy_of(PROMPTS, NUM_TOKENS)


class Redis:
    """The Redis of the run."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment
        (self._socket,) = deployment.run_root.glob("*/redis.sock")

    def command(self, *command: str) -> object:
        with redis.Redis(unix_socket_path=str(self._socket), protocol=2) as client:
            return client.execute_command(*command)

    def signal(self, number: signal.Signals) -> None:
        for pid in self._deployment.running("valkey"):
            os.kill(pid, number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)

    def flush(self) -> None:
        self.command("FLUSHALL")

    def flush_with_functions(self) -> None:
        self.command("FLUSHALL")
        self.command("FUNCTION", "FLUSH")


@asynccontextmanager
async def streaming(
    client: AsyncClient, expected: list[list[int]]
) -> AsyncIterator[list[list[int]]]:
    """Run all prompts at once. Yields the tokens received so far once all streams have begun; in
    the end every stream has all its tokens without an error."""
    tokens: list[list[int]] = [[] for _ in PROMPTS]

    async def stream(number: int) -> None:
        async for delta in client.generate(PROMPTS[number], GREEDY, timeout_s=LIMIT_S):
            tokens[number] += delta.token_ids

    async with asyncio.timeout(LIMIT_S):
        streams = [asyncio.create_task(stream(number)) for number in range(NUM_STREAMS)]
        await until(lambda: all(tokens))
        yield tokens
        await asyncio.gather(*streams)
        assert tokens == expected


def pids(deployment: Deployment) -> dict[str, list[int]]:
    return {name: deployment.running(name) for name in SERVICES}


@pytest.mark.parametrize("lose", [Redis.kill, Redis.flush_with_functions])
async def test_streams_go_on_when_redis_loses_everything(
    deployment: Deployment,
    client: AsyncClient,
    expected: list[list[int]],
    lose: Callable[[Redis], None],
) -> None:
    server, before = Redis(deployment), pids(deployment)
    async with streaming(client, expected):
        lose(server)
    completion = await client.complete(PROMPTS[0], GREEDY, timeout_s=LIMIT_S)
    assert list(completion.token_ids) == expected[0]
    assert (completion.usage.num_cached_tokens or 0) >= 32
    await quiet(client)
    assert pids(deployment) == before


async def test_finished_requests_are_not_held_again(
    deployment: Deployment, client: AsyncClient, expected: list[list[int]]
) -> None:
    """The issuer of the ticket knows that it was claimed, and does not report it as held."""
    completion = await client.complete(PROMPTS[0], GREEDY, timeout_s=LIMIT_S)
    assert list(completion.token_ids) == expected[0]
    await quiet(client)
    Redis(deployment).flush()
    pools = await until(
        client.pools,
        lambda pools: len(pools) == 1 and not any(pool.recovering for pool in pools),
        not_yet=(QuireError,),  # the block manager is not in the registry yet
    )
    assert not any(pool.num_held for pool in pools)


async def test_an_old_copy_of_redis_is_not_used(
    deployment: Deployment, client: AsyncClient, expected: list[list[int]]
) -> None:
    """Redis returns with a copy that it had saved while other streams were running."""
    server, before = Redis(deployment), pids(deployment)
    async with streaming(client, expected):
        server.command("SAVE")
    dump = next(deployment.run_root.glob("*/dump.rdb"))
    try:
        async with streaming(client, expected):
            assert dump.stat().st_size > 0
            server.kill()
        await quiet(client)
    finally:
        dump.unlink()
    assert pids(deployment) == before
    assert "law_broken" not in deployment.log.read_text()


async def test_a_stuck_worker_delays_others_only_until_it_is_fenced(
    deployment: Deployment, client: AsyncClient, expected: list[list[int]]
) -> None:
    """Redis is lost while a decode worker is stopped: its streams continue elsewhere, and the
    blocks that it may still write are given to no one before it is gone."""
    server = Redis(deployment)
    victim = deployment.running("--role=decode")[0]
    async with streaming(client, expected):
        os.kill(victim, signal.SIGSTOP)
        server.flush()
        try:
            completion = await client.complete(PROMPTS[0], GREEDY, timeout_s=LIMIT_S)
            assert list(completion.token_ids) == expected[0]
        finally:
            os.kill(victim, signal.SIGCONT)
    await quiet(client)
    assert victim in deployment.running("--role=decode")
    assert "worker_given_up" in deployment.log.read_text()
