"""Speculation in a deployment: the tokens are those without it, also when a decode worker is killed
in mid-stream; usage and metrics count the drafts."""

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench.make_checkpoint import make_checkpoint
from quire import LLM, Choice, Sampling
from quire.async_client import AsyncClient
from quire.messages import Request
from quire.types import Beam, Delta, StructuredOutput
from tests.drafting import AsMany

from .conftest import POOL_MEMORY
from .decoders import decoders, pid_of
from .deployment import Deployment, serving
from .quiet import quiet

NUM_TOKENS = 900
CONFIG = {"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1}
PROMPT = tuple(range(260, 300))
STRATEGIES = {
    "greedy": Sampling(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True),
    "sampled": Sampling(temperature=0.3, seed=5, n=2, max_tokens=NUM_TOKENS, ignore_eos=True),
    "logprobs": Sampling(
        temperature=0.2, seed=6, logprobs=2, max_tokens=NUM_TOKENS, ignore_eos=True
    ),
    "penalties": Sampling(
        temperature=0, repetition_penalty=1.02, max_tokens=NUM_TOKENS, ignore_eos=True
    ),
    "structured": Sampling(
        temperature=0,
        structured_outputs=StructuredOutput(regex=r"([a-z]{2,5}[.,] ){150}"),
        max_tokens=NUM_TOKENS,
    ),
    "beams": Sampling(temperature=0, beam=Beam(2), max_tokens=100, ignore_eos=True),
}
STREAMED = [name for name in STRATEGIES if name not in ("structured", "beams")]


@pytest.fixture(scope="module")
def looping(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose greedy text repeats itself."""
    return make_checkpoint(tmp_path_factory.mktemp("looping"), embedding_std=20.0, tied=False)


@pytest.fixture(scope="module")
def deployment(looping: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    options = ["--decode", "2", "--pool-memory", str(8 * POOL_MEMORY)]
    options += ["--speculative-config", json.dumps({**CONFIG, "prompt_lookup_max": 4})]
    with serving(looping, tmp_path_factory.mktemp("run"), *options) as running:
        yield running


@pytest.fixture(scope="module")
def expected(looping: Path) -> dict[str, tuple[Choice, ...]]:
    """The answers without speculation."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("services.offline.llm.configure_logging", lambda *_: None)
        with LLM(str(looping), pool_memory=str(8 * POOL_MEMORY), threads=1) as llm:
            answers = llm.generate(
                [list(PROMPT)] * len(STRATEGIES), list(STRATEGIES.values()), use_tqdm=False
            )
    assert not any(answer.usage.num_accepted_drafts for answer in answers)
    return dict(zip(STRATEGIES, (answer.choices for answer in answers), strict=True))


async def test_no_token_changes_when_a_worker_is_killed(
    deployment: Deployment, expected: dict[str, tuple[Choice, ...]], client: AsyncClient
) -> None:
    """All strategies run at once, and both decode workers die, one after the other."""
    received: dict[str, list[Delta]] = {name: [] for name in STRATEGIES}

    async def read(name: str) -> None:
        async for delta in client.send(Request(PROMPT, STRATEGIES[name]), 60):
            received[name].append(delta)

    async with asyncio.timeout(90):
        reading = [asyncio.create_task(read(name)) for name in STRATEGIES]
        for least in (100, 250):
            while min(num_tokens(received[name]) for name in STREAMED) < least:
                await asyncio.sleep(0.002)
            for worker in [one for one in await decoders(client) if one.num_running]:
                os.kill(pid_of(deployment, worker), signal.SIGKILL)
        await asyncio.gather(*reading)
        await quiet(client)
    for name, deltas in received.items():
        for choice in expected[name]:
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


def test_offline_with_as_many_drafts_as_there_are(
    looping: Path, expected: dict[str, tuple[Choice, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every possible draft is verified, whether it pays or not, also with penalties and with masks
    of a grammar."""
    monkeypatch.setattr("services.engine.speculation.speculation.Payoff", AsMany)
    monkeypatch.setattr("services.offline.llm.configure_logging", lambda *_: None)
    with LLM(
        str(looping), pool_memory=str(8 * POOL_MEMORY), threads=1, speculative_config=CONFIG
    ) as llm:
        for name in (*STREAMED, "structured"):
            (answer,) = llm.generate(list(PROMPT), STRATEGIES[name], use_tqdm=False)
            assert answer.choices == expected[name]
            assert answer.usage.num_accepted_drafts > 20
            assert answer.usage.num_rejected_drafts > 0
