"""Embeddings equal the states of transformers, with the same bits in every batch, from the cache,
over every API, and when a prefill worker is killed."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
from transformers import AutoModel

from quire import LLM, AsyncClient, Client, InvalidRequest, QuireError
from tests.e2e.conftest import POOL_MEMORY
from tests.e2e.deployment import Deployment

PROMPTS = [[7 + i, 11, *range(20, 20 + 9 * i), 3] for i in range(12)]
TOLERANCE = 2e-5
"""The largest difference of a value of a vector of length 1, in fp32."""


@pytest.fixture(scope="module")
def mean(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with mean pooling, trained for 16 dimensions."""
    directory = tmp_path_factory.mktemp("mean") / "model"
    shutil.copytree(checkpoint, directory)
    modules = [{"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    pooling = {"pooling_mode_mean_tokens": True}
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    config = json.loads((directory / "config.json").read_text())
    config["matryoshka_dimensions"] = [16]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="module")
def states(checkpoint: Path) -> list[torch.Tensor]:
    torch.set_num_threads(1)
    model: Any = AutoModel.from_pretrained(checkpoint, dtype=torch.float32)
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in PROMPTS]


def near(found: Any, pooled: torch.Tensor) -> bool:
    expected = torch.nn.functional.normalize(pooled.double(), dim=0).numpy()
    return bool(np.abs(np.array(found) - expected).max() <= TOLERANCE)


async def test_the_last_state_of_transformers_over_every_api(
    checkpoint: Path, deployment: Deployment, states: list[torch.Tensor]
) -> None:
    """Twelve requests at once over gRPC, again from the prefix cache, over HTTP, and offline."""
    async with AsyncClient(deployment.address) as client:
        batches = [await asyncio.gather(*map(client.embed, PROMPTS)) for _ in range(2)]
        alone = await client.embed(PROMPTS[5])
    found = [one.values for one in batches[0]]
    assert all(near(*each) for each in zip(found, [one[-1] for one in states], strict=True))
    assert [one.values for one in batches[1]] == found
    assert alone.values == found[5]
    assert [one.num_prompt_tokens for one in batches[0]] == list(map(len, PROMPTS))
    async with openai.AsyncOpenAI(base_url=f"{deployment.http}/v1", api_key="-") as http:
        answer = await http.embeddings.create(model="", input=PROMPTS, encoding_format="float")
    assert [tuple(map(np.float32, one.embedding)) for one in answer.data] == found
    assert answer.usage.prompt_tokens == sum(map(len, PROMPTS))
    with LLM(str(checkpoint), pool_memory=str(POOL_MEMORY), threads=1) as llm:
        assert [one.values for one in llm.embed(PROMPTS, use_tqdm=False)] == found


def test_the_mean_of_all_states_in_chunks(mean: Path, states: list[torch.Tensor]) -> None:
    """The bits do not depend on the chunks, nor on cached prefixes."""
    settings: dict[str, Any] = {"pool_memory": str(POOL_MEMORY), "threads": 1}
    with LLM(str(mean), **settings) as llm:
        found = [one.values for one in llm.embed(PROMPTS, use_tqdm=False)]
        assert [one.values for one in llm.embed(PROMPTS[::-1], use_tqdm=False)] == found[::-1]
        short = llm.embed(PROMPTS[11], dimensions=16, use_tqdm=False)[0].values
        with pytest.raises(InvalidRequest, match="dimensions is 17; this model is trained for 16"):
            llm.embed(PROMPTS[11], dimensions=17, use_tqdm=False)
    assert all(near(*each) for each in zip(found, [one.mean(0) for one in states], strict=True))
    assert near(short, states[11].mean(0)[:16])
    with LLM(str(mean), max_num_batched_tokens=16, max_num_seqs=8, **settings) as chunked:
        assert [one.values for one in chunked.embed(PROMPTS, use_tqdm=False)] == found


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_prompt_may_fill_the_context(
    checkpoint: Path, mean: Path, states: list[torch.Tensor], pooling: str
) -> None:
    """In blocks of 16 tokens, which it fills or does not."""
    directory = checkpoint if pooling == "last" else mean
    for prompt, of_prompt in zip(PROMPTS[-2:], states[-2:], strict=True):
        length = len(prompt)
        settings: dict[str, Any] = {"max_model_len": length, "max_num_batched_tokens": 16}
        settings |= {"pool_memory": str(POOL_MEMORY), "threads": 1, "max_num_seqs": 8}
        with LLM(str(directory), **settings) as llm:
            (found,) = llm.embed(prompt, use_tqdm=False)
            with pytest.raises(QuireError, match=f"context length is {length} .* {length + 1} tok"):
                llm.embed([[*prompt, 5]], use_tqdm=False)
            with pytest.raises(QuireError, match=f"context length is {length} .* {length} tokens"):
                llm.generate([list(prompt)], use_tqdm=False)
        assert near(found.values, of_prompt[-1] if pooling == "last" else of_prompt.mean(0))


def test_scores_are_cosines(checkpoint: Path) -> None:
    with LLM(str(checkpoint), pool_memory=str(POOL_MEMORY), threads=1) as llm:
        one, same, other = llm.embed(["blocks", "blocks", "a table"], use_tqdm=False)
        cosine = sum(a * b for a, b in zip(one.values, other.values, strict=True))
        assert one == same
        scores = llm.score("blocks", ["blocks", "a table"], use_tqdm=False)
        assert scores == pytest.approx([1.0, cosine], abs=1e-6)
        with pytest.raises(InvalidRequest, match="2 texts for 3 others"):
            llm.score(["a", "b"], ["a", "b", "c"])


def test_bad_input_is_refused(deployment: Deployment) -> None:
    with Client(deployment.address) as client:
        for prompt, dimensions, problem in (
            ([], None, "the prompt is empty"),
            ([10**6], None, "not in the vocabulary"),
            ([1] * 5000, None, "maximum context length"),
            ([1], 65, r"dimensions is 65, not in \[1, 64\]"),
            ([1], 32, "trained for no fewer than 64"),
        ):
            with pytest.raises(InvalidRequest, match=problem):
                client.embed(prompt, dimensions)
        assert len(client.embed([1]).values) == 64
