"""`best_of` through real processes: the answer is the likeliest of the samples that `n` alone
draws, also when a gateway is killed."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from quire.async_client import AsyncClient
from quire.types import Choice, Completion, Sampling

from .decoders import busiest, until_two_serve
from .deployment import Deployment, deploying
from .quiet import quiet

LIMIT_S = 90.0
NUM, NUM_BEST = 8, 3
NUM_TOKENS = 1500


deployment = deploying("--decode", "2", "--pool-memory", "64MiB", num_gateways=2)


@pytest.fixture
async def client(deployment: Deployment) -> AsyncIterator[AsyncClient]:
    """A client. Two decode workers serve before the test; after it nothing is held and the audit is
    clean."""
    async with AsyncClient(deployment.address, operations=deployment.operations) as client:
        await until_two_serve(client)
        yield client
        await quiet(client, LIMIT_S)


def prompt(number: int) -> list[int]:
    chance = random.Random(number)
    return [chance.randrange(259, 384) for _ in range(45)]


def drawn(num_tokens: int = NUM_TOKENS, **changes: Any) -> Sampling:
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 5, "ignore_eos": True, **changes}
    return Sampling(max_tokens=num_tokens, **fields)


def mean_logprob(choice: Choice) -> float:
    of_each = [each.chosen.logprob for each in choice.logprobs]
    return sum(of_each) / len(of_each)


async def undisturbed(client: AsyncClient, number: int, num_tokens: int) -> list[Choice]:
    """All samples, likeliest first."""
    every = drawn(num_tokens, n=NUM, logprobs=0)
    completion = await client.complete(prompt(number), every, timeout_s=LIMIT_S)
    return sorted(completion.choices, key=mean_logprob, reverse=True)


def choosing(client: AsyncClient, number: int, num_tokens: int) -> asyncio.Task[Completion]:
    sampling = drawn(num_tokens, n=NUM_BEST, best_of=NUM)
    call = client.complete(prompt(number), sampling, timeout_s=LIMIT_S)
    return asyncio.create_task(call)


def check(completion: Completion, ranked: list[Choice]) -> None:
    best = ranked[:NUM_BEST]
    assert [choice.index for choice in completion.choices] == list(range(NUM_BEST))
    assert [choice.token_ids for choice in completion.choices] == [each.token_ids for each in best]
    scores = [choice.score for choice in completion.choices]
    assert scores == pytest.approx([mean_logprob(each) for each in best])
    assert not any(choice.logprobs for choice in completion.choices)
    num_drawn = sum(len(each.token_ids) for each in ranked)
    assert completion.usage.num_generated_tokens == num_drawn


async def test_best_of_returns_the_likeliest_samples(client: AsyncClient) -> None:
    ranked = await undisturbed(client, 1, 60)
    assert [each.index for each in ranked[:NUM_BEST]] != list(range(NUM_BEST))
    check(await choosing(client, 1, 60), ranked)


async def test_best_of_does_not_change_when_a_gateway_is_killed(
    deployment: Deployment, client: AsyncClient
) -> None:
    """The client has received nothing, so the other gateway draws all samples again."""
    ranked = await undisturbed(client, 3, NUM_TOKENS)
    completing = choosing(client, 3, NUM_TOKENS)
    await busiest(deployment, client)
    os.kill(deployment.gateway(client.address), signal.SIGKILL)
    assert not completing.done()
    check(await completing, ranked)
    deployment.wait_until_ready()
