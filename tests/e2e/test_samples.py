"""Several samples of one prompt through real processes: each is drawn as it is alone."""

import json
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import httpx
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


@pytest.mark.parametrize("stream", [False, True])
async def test_samples_over_http(
    deployment: Deployment, client: AsyncClient, two_decoders: None, stream: bool
) -> None:
    """Two prompts of three samples each are six choices, in the order of the prompts."""
    expected = [
        tokens for number in (5, 6) for tokens in await samples(client, number, drawn(3, 50))
    ]
    body = {
        "prompt": [prompt(5), prompt(6)],
        "n": 3,
        "seed": 5,
        "temperature": 1.0,
        "max_tokens": 50,
        "ignore_eos": True,
        "return_token_ids": True,
        "stream": stream,
    }
    got: dict[int, list[int]] = {index: [] for index in range(6)}
    async with httpx.AsyncClient(timeout=LIMIT_S, trust_env=False) as http:
        if stream:
            async with http.stream(
                "POST", f"{deployment.http}/v1/completions", json=body
            ) as answer:
                async for part in _events(answer):
                    for choice in part["choices"]:
                        got[choice["index"]] += choice["token_ids"]
        else:
            answer = await http.post(f"{deployment.http}/v1/completions", json=body)
            for choice in answer.json()["choices"]:
                got[choice["index"]] += choice["token_ids"]
            assert answer.json()["usage"]["completion_tokens"] == 6 * 50
    assert list(got.values()) == expected


def test_the_command_shows_samples_apart(deployment: Deployment) -> None:
    flags = "--raw --n 3 --max-tokens 20 --seed 1 --temperature 1 --ignore-eos"
    command = [sys.executable, "-m", "quire.cli", "generate", "Once upon", *flags.split()]
    shown = subprocess.run(
        [*command, "--address", deployment.address],
        capture_output=True,
        check=True,
        timeout=LIMIT_S,
    ).stdout.decode(errors="replace")
    headings = [line for line in shown.splitlines() if line.startswith("--- ")]
    assert headings == [f"--- {number} of 3 ---" for number in (1, 2, 3)]


async def _events(answer: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    async for line in answer.aiter_lines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))
