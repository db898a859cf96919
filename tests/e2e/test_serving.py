"""A whole deployment against the oracle: its tokens, its shared blocks, and the blocks that it
releases."""

import asyncio
import random
from collections.abc import Sequence

import pytest

from advisor.advice import RecordedRequest, read_workload
from quire.async_client import AsyncClient
from quire.errors import QuireError
from quire.types import Completion, Sampling
from tests.waiting import until

from .conftest import POOL_BLOCKS, Oracle
from .deployment import Deployment
from .quiet import quiet


def greedy(num_tokens: int) -> Sampling:
    return Sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def prompt(seed: int, length: int) -> list[int]:
    return [random.Random(seed * 1000 + n).randrange(259, 384) for n in range(length)]


def assert_clean(audits: Sequence[object]) -> None:
    assert audits
    for audit in audits:
        assert not audit.violations  # type: ignore[attr-defined]
        assert audit.num_free + audit.num_cached + audit.num_held == audit.num_blocks  # type: ignore[attr-defined]


def assert_greedy(oracle: Oracle, tokens: Sequence[int], completion: Completion) -> None:
    assert list(completion.token_ids) == oracle.choices(tokens, completion.token_ids)


@pytest.mark.parametrize("length", [1, 17, 700])
async def test_greedy_tokens_are_those_of_transformers(
    client: AsyncClient, oracle: Oracle, length: int
) -> None:
    """Tokens are equal without a cache, and then with a cached prefix."""
    tokens = prompt(9000 + length, length)  # of no other test of this deployment
    expected = oracle.greedy(tokens, 24)
    for cached in (False, True):
        completion = await client.complete(tokens, greedy(24))
        assert list(completion.token_ids) == expected
        assert completion.usage.num_prompt_tokens == length
        assert completion.usage.num_generated_tokens == 24
        assert bool(completion.usage.num_cached_tokens) == (cached and length >= 16)
    await quiet(client)


async def test_64_streams_on_a_sixteenth_of_their_memory(
    client: AsyncClient, oracle: Oracle
) -> None:
    """64 requests of 32 blocks on 128 blocks are preempted, swapped out and requeued, and all
    tokens are right."""
    lengths = [random.Random(n).randrange(10, 100) for n in range(64)]
    prompts = [prompt(100 + n, length) for n, length in enumerate(lengths)]
    assert 16 * POOL_BLOCKS == 64 * 32
    running = [asyncio.create_task(client.complete(p, greedy(512 - len(p)))) for p in prompts]
    while not all(task.done() for task in running):
        assert_clean(await client.audit())
        await asyncio.sleep(0.1)
    completions = [task.result() for task in running]
    assert sum(completion.usage.num_preemptions for completion in completions) > 0
    (swap_pool,) = [p for p in await client.pools() if p.model.endswith("-swap")]
    assert swap_pool.num_prefix_queries > 0
    for p, completion in zip(prompts, completions, strict=True):
        assert len(completion.token_ids) == 512 - len(p)
        assert_greedy(oracle, p, completion)
    await quiet(client)


NUM_PROMPT, NUM_GENERATED = 43, 13  # of no other test


async def test_the_log_of_a_run_is_a_workload(client: AsyncClient, deployment: Deployment) -> None:
    """The log has the numbers of tokens in order of arrival; the second prompt found two blocks of
    the first."""
    draw = random.Random(43)
    tokens = [draw.randrange(259, 384) for _ in range(NUM_PROMPT)]
    sampling = Sampling(temperature=0.0, max_tokens=NUM_GENERATED, ignore_eos=True)
    for _ in range(2):
        await client.complete(tokens, sampling)
    lines = await until(lambda: logged(deployment), lambda lines: len(lines) == 2)
    first, second = lines  # they come through the supervisor
    assert (first.prefix, second.prefix) == ("", "32 tokens")
    assert second.num_shared_tokens == 32
    assert first.arrival_s < second.arrival_s


def logged(deployment: Deployment) -> list[RecordedRequest]:
    """The request lines of this test; none while a line is incomplete."""
    try:
        workload = read_workload(deployment.log)
    except QuireError:
        return []
    asked = (NUM_PROMPT, NUM_GENERATED)
    return [r for r in workload.requests if (r.num_prompt_tokens, r.num_generated_tokens) == asked]
