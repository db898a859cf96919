"""`quire reload` serves new weights in the running processes: streams go on with them."""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from bench.make_checkpoint import make_checkpoint
from quire.async_client import AsyncClient
from quire.errors import InvalidRequest
from quire.types import Completion, Sampling
from tests.adapters import AdapterOracle
from tests.waiting import until

from .conftest import POOL_MEMORY, Oracle
from .deployment import Deployment, serving
from .quiet import quiet
from .weights import WEIGHTS, other_bytes, point

PROMPTS = [list(range(259 + number, 299 + number)) for number in range(3)]
NUM_TOKENS = 300
GREEDY = Sampling(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def deployment(linked: Deployment) -> Deployment:
    return linked


def link(deployment: Deployment) -> Path:
    return deployment.log.parent / "model"


async def tokens_of(client: AsyncClient, prompt: list[int]) -> list[int]:
    stream = client.generate(prompt, GREEDY, timeout_s=60)
    return [token async for delta in stream for token in delta.token_ids]


@asynccontextmanager
async def load(client: AsyncClient) -> AsyncIterator[list[tuple[list[int], list[int]]]]:
    """Clients that send one request after another, and note each prompt and its answer. Raises the
    error of a client that had one."""
    answers: list[tuple[list[int], list[int]]] = []
    has_ended = asyncio.Event()

    async def send(prompt: list[int]) -> None:
        while not has_ended.is_set():
            answers.append((prompt, await tokens_of(client, prompt)))

    sending = [asyncio.create_task(send(prompt)) for prompt in PROMPTS]
    await until(lambda: len(answers) >= len(PROMPTS))
    yield answers
    has_ended.set()
    await asyncio.gather(*sending)


async def test_adapters_and_a_draft_model_go_on_with_the_new_weights(
    checkpoint: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """The adapter is loaded again for the new weights, and the draft model drafts for them, if that
    pays."""
    (tmp_path / "model").symlink_to(make_checkpoint(tmp_path / "old", seed=1))
    drafting = json.dumps({"model": str(checkpoint), "num_speculative_tokens": 3})
    options = ["--lora", f"poet={adapters['poet']}", "--speculative-config", drafting]
    options += ["--pool-memory", str(POOL_MEMORY)]
    with serving(tmp_path / "model", tmp_path, *options) as deployment:
        async with AsyncClient(deployment.address, operations=deployment.operations) as client:

            async def told(name: str, prompt: list[int], max_tokens: int) -> Completion:
                sampling = replace(GREEDY, max_tokens=max_tokens)
                return await client.complete(prompt, sampling, model=name, timeout_s=60)

            await until(client.models, lambda found: len(found) == 2)
            names = ["model", "poet"]
            point(link(deployment), checkpoint)
            waiting = [asyncio.create_task(told(name, PROMPTS[1], NUM_TOKENS)) for name in names]
            assert await client.reload()
            for completion in await asyncio.gather(*waiting):
                assert len(completion.token_ids) == NUM_TOKENS
            for name in names:
                completion = await told(name, PROMPTS[0], 40)
                oracle = AdapterOracle(checkpoint, adapters.get(name))
                assert list(completion.token_ids) == oracle.greedy(tuple(PROMPTS[0]), 40)[0]
            await quiet(client)


async def identities(client: AsyncClient) -> dict[str, int]:
    return {worker.worker_id: worker.pid for worker in await client.workers()}


async def test_streams_go_on_with_the_new_weights_from_their_tokens(
    deployment: Deployment, client: AsyncClient, oracle: Oracle, tmp_path: Path
) -> None:
    """The KV of the old weights serves no token after them."""
    before = await identities(client)
    point(link(deployment), new := make_checkpoint(tmp_path / "new", seed=1))
    async with load(client) as answers:
        worker_ids = await client.reload()
    after, new_oracle, num_mixed = await identities(client), Oracle(new), 0
    assert set(worker_ids) == after.keys()
    assert not after.keys() & before.keys()
    assert sorted(after.values()) == sorted(before.values())
    assert GREEDY.max_tokens is not None
    for prompt, tokens in answers:
        old_choices, new_choices = (o.choices(prompt, tokens) for o in (oracle, new_oracle))
        pairs = zip(tokens, old_choices, strict=True)
        change = next((at for at, (token, old) in enumerate(pairs) if token != old), len(tokens))
        assert (len(tokens), tokens[change:]) == (NUM_TOKENS, new_choices[change:])
        num_mixed += 0 < change < len(tokens)
    assert num_mixed
    for prompt in PROMPTS:  # its KV under the old weights was cached
        assert await tokens_of(client, prompt) == new_oracle.greedy(prompt, NUM_TOKENS)
    assert await client.reload() == ()
    await quiet(client)
    assert len(await client.pools()) == 1


async def test_what_cannot_be_served_is_refused_and_nothing_pauses(
    deployment: Deployment, client: AsyncClient, checkpoint: Path, tmp_path: Path
) -> None:
    undisturbed, before = await tokens_of(client, PROMPTS[0]), await identities(client)
    cut = other_bytes(checkpoint, tmp_path / "cut")
    os.truncate(cut / WEIGHTS, 1000)
    narrow = make_checkpoint(tmp_path / "narrow", hidden_size=32)
    shutil.copy(narrow / WEIGHTS, other_bytes(checkpoint, tmp_path / "wrong") / WEIGHTS)
    deep = make_checkpoint(tmp_path / "deep", num_layers=3)
    refused = {
        tmp_path / "nowhere": "no such checkpoint",
        cut: WEIGHTS,
        tmp_path / "wrong": "shape",
        deep: "num_layers is 3, and 2 in the model that is served",
    }
    for directory, reason in refused.items():
        point(link(deployment), directory)
        with pytest.raises(InvalidRequest, match=reason):
            await client.reload()
    assert await identities(client) == before
    assert await tokens_of(client, PROMPTS[0]) == undisturbed
