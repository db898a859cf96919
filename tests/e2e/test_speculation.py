"""Speculation in a deployment: the tokens are those without it, also when a decode worker is killed
or drained in mid-stream; usage and metrics count the drafts."""

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import le
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.make_checkpoint import make_checkpoint
from quire import LLM, Choice, Sampling
from quire.async_client import AsyncClient
from quire.messages import Request
from quire.types import Beam, Delta, StructuredOutput
from tests.waiting import until

from .conftest import POOL_MEMORY
from .decoders import busiest, busy, figures, pid_of, until_two_serve
from .deployment import Deployment, serving
from .quiet import quiet

PROMPT = tuple(range(260, 300))
LOOPS: dict[str, Any] = {"embedding_std": 20.0, "tied": False}
"""A checkpoint whose greedy text repeats itself, and is nearly the same with fewer layers."""
LARGER: dict[str, Any] = {
    "embedding_std": 40.0,  # 16 layers say more than 2
    "tied": False,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_heads": 8,
    "num_kv_heads": 4,
    "head_dim": 64,
    "vocab_size": 2048,
    "dtype": "bfloat16",
}


@dataclass(frozen=True, slots=True)
class Method:
    """`kill_at`: after how many tokens of each stream the decode workers die."""

    config: dict[str, Any]
    num_tokens: int
    kill_at: tuple[int, int]
    model: dict[str, Any]
    pool_memory: int
    draft: dict[str, Any] | None = None

    @property
    def strategies(self) -> dict[str, Sampling]:
        whole = Sampling(max_tokens=self.num_tokens, ignore_eos=True)
        words = StructuredOutput(regex=rf"([a-z]{{2,5}}[.,] ){{{self.num_tokens // 6}}}")
        return {
            "greedy": replace(whole, temperature=0),
            "sampled": replace(whole, temperature=0.3, seed=5, n=2),
            "logprobs": replace(whole, temperature=0.2, seed=6, logprobs=2),
            "penalties": replace(whole, temperature=0, repetition_penalty=1.02),
            "structured": replace(whole, temperature=0, structured_outputs=words, ignore_eos=False),
            "beams": replace(whole, temperature=0, beam=Beam(2), max_tokens=self.num_tokens // 9),
        }


METHODS = {
    "ngram": Method(
        {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4},
        *(900, (100, 250), LOOPS, 8 * POOL_MEMORY),
    ),
    # So many layers that a draft of one layer pays.
    "draft_model": Method(
        {"method": "draft_model", "draft_kv_memory": "64MiB"},
        *(360, (40, 100), {**LARGER, "num_layers": 16}, 128 << 20),
        draft={**LARGER, "num_layers": 1},
    ),
}
STREAMED = ("greedy", "sampled", "logprobs", "penalties")


@pytest.fixture(
    scope="module", params=[pytest.param("ngram", marks=pytest.mark.full), "draft_model"]
)
def method(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Method:
    """With a draft model, if the method has one."""
    method = METHODS[request.param]
    config = {**method.config, "num_speculative_tokens": 6}
    if method.draft is not None:
        folder = tmp_path_factory.mktemp("draft")
        config["model"] = str(make_checkpoint(folder, **method.draft))
    return replace(method, config=config)


@pytest.fixture(scope="module")
def looping(method: Method, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("looping"), **method.model)


@pytest.fixture(scope="module")
def deployment(
    method: Method, looping: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    options = ["--decode", "2", "--pool-memory", str(method.pool_memory)]
    options += ["--speculative-config", json.dumps(method.config)]
    with pytest.MonkeyPatch.context() as patch:
        # While both decode workers are killed, no worker serves until one has loaded the models.
        patch.setenv("QUIRE_GATEWAY_PATIENCE_S", "60")
        with serving(looping, tmp_path_factory.mktemp("run"), *options) as running:
            yield running


@pytest.fixture(scope="module")
def expected(method: Method, looping: Path) -> dict[str, tuple[Choice, ...]]:
    """The answers without speculation."""
    strategies = method.strategies
    with LLM(str(looping), pool_memory=str(method.pool_memory), threads=1) as llm:
        answers = llm.generate(
            [list(PROMPT)] * len(strategies), list(strategies.values()), use_tqdm=False
        )
    assert not any(answer.usage.num_accepted_drafts for answer in answers)
    return dict(zip(strategies, (answer.choices for answer in answers), strict=True))


async def test_no_token_changes_when_a_worker_is_killed(
    method: Method,
    deployment: Deployment,
    expected: dict[str, tuple[Choice, ...]],
    client: AsyncClient,
) -> None:
    """All strategies run at once, and both decode workers die, one after the other."""

    async def kill() -> None:
        for worker in await busy(deployment, client):
            os.kill(pid_of(deployment, worker), signal.SIGKILL)

    received = await disturbed(method, client, kill, method.kill_at)
    for name, deltas in received.items():
        check(name, deltas, expected[name])


async def test_no_token_changes_when_a_worker_is_drained(
    method: Method,
    deployment: Deployment,
    expected: dict[str, tuple[Choice, ...]],
    client: AsyncClient,
) -> None:
    """Its requests move to the other decode worker, with their blocks."""
    await until_two_serve(client)
    (num_moves,) = await figures(deployment, "num_moves")

    async def drain() -> None:
        await client.drain((await busiest(deployment, client)).worker_id)

    received = await disturbed(method, client, drain, [5])
    for name, deltas in received.items():
        check(name, deltas, expected[name])
    (moved,) = await figures(deployment, "num_moves")
    assert moved > num_moves
    await until_two_serve(client)


async def disturbed(
    method: Method,
    client: AsyncClient,
    disturb: Callable[[], Awaitable[None]],
    when: Sequence[int],
) -> dict[str, list[Delta]]:
    """Returns the deltas of all strategies' streams. The workers are disturbed each time that
    all streams have so many tokens."""
    received: dict[str, list[Delta]] = {name: [] for name in method.strategies}

    async def read(name: str, sampling: Sampling) -> None:
        async for delta in client.send(Request(PROMPT, sampling), 60):
            received[name].append(delta)

    def fewest_tokens() -> int:
        return min(num_tokens(received[name]) for name in STREAMED)

    async with asyncio.timeout(90), asyncio.TaskGroup() as reading:
        for one in method.strategies.items():
            reading.create_task(read(*one))
        for least in when:
            await until(fewest_tokens, partial(le, least), longest_pause_s=0.002)
            await disturb()
    await quiet(client)
    return received


def check(name: str, deltas: list[Delta], expected: tuple[Choice, ...]) -> None:
    for choice in expected:
        own = [delta for delta in deltas if delta.index == choice.index]
        assert tuple(t for delta in own for t in delta.token_ids) == choice.token_ids
        assert tuple(one for delta in own for one in delta.logprobs) == choice.logprobs
    usage = deltas[-1].usage
    assert usage is not None
    if name in ("greedy", "sampled", "logprobs"):
        assert usage.num_accepted_drafts > 0
    if name == "beams":
        assert usage.num_accepted_drafts == usage.num_rejected_drafts == 0


def num_tokens(deltas: list[Delta]) -> int:
    return sum(len(delta.token_ids) for delta in deltas)


async def test_usage_over_http_counts_drafts(deployment: Deployment) -> None:
    body = {"prompt": list(PROMPT), "temperature": 0, "max_tokens": 300, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=deployment.http) as http:
        answer = await http.post("/v1/completions", json=body, timeout=60)
        usage = answer.json()["usage"]
        details = usage["completion_tokens_details"]
        assert usage["completion_tokens"] == 300
        assert details["accepted_prediction_tokens"] > 100
        assert details["rejected_prediction_tokens"] >= 0
        one = await http.post("/v1/completions", json={**body, "max_tokens": 1}, timeout=60)
        assert one.json()["usage"]["completion_tokens_details"] is None
