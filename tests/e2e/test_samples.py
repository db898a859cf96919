"""Several samples of one prompt through real processes: each is drawn as it is alone."""

import random
from typing import Any

import pytest

from quire.async_client import AsyncClient
from quire.types import Sampling

from .conftest import Oracle
from .deployment import Deployment

LIMIT_S = 90.0


@pytest.fixture(scope="module")
def deployment(roomy: Deployment) -> Deployment:
    return roomy


def prompt(number: int) -> list[int]:
    chance = random.Random(number)
    return [chance.randrange(259, 384) for _ in range(45)]


def drawn(n: int, num_tokens: int, **changes: Any) -> Sampling:
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 5, "ignore_eos": True, **changes}
    return Sampling(max_tokens=num_tokens, n=n, **fields)


async def samples(client: AsyncClient, number: int, sampling: Sampling) -> list[list[int]]:
    completion = await client.complete(prompt(number), sampling, timeout_s=LIMIT_S)
    assert [choice.index for choice in completion.choices] == list(range(sampling.n))
    return [list(choice.token_ids) for choice in completion.choices]


async def test_a_sample_depends_on_seed_and_index_alone(
    client: AsyncClient, two_decoders: None
) -> None:
    """Sample 0 equals a single sample; the number of samples changes none."""
    eight = await samples(client, 1, drawn(8, 60))
    assert await samples(client, 1, drawn(3, 60)) == eight[:3]
    assert await samples(client, 1, drawn(1, 60)) == eight[:1]
    assert len(set(map(tuple, eight))) == 8
    assert all(len(tokens) == 60 for tokens in eight)


async def test_greedy_samples_are_the_oracles(
    client: AsyncClient, oracle: Oracle, two_decoders: None
) -> None:
    """Each sample reads its own blocks: the shared blocks of the prompt, and copied ones."""
    same = await samples(client, 2, drawn(4, 40, temperature=0.0))
    assert same == [same[0]] * 4
    assert oracle.choices(prompt(2), same[0]) == same[0]
