"""/v1/embeddings in OpenAI's shape, as OpenAI's own client reads it."""

from typing import Any

import httpx
import numpy as np
import openai
import pytest

from .conftest import FakeGenerator

VALUES = [0.6, -0.8]


async def test_openais_client_reads_vectors(
    client: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    """It asks for base64 unless told otherwise."""
    for form in ({}, {"encoding_format": "float"}):
        answer = await client.embeddings.create(model="tiny", input=["a", "b"], **form)  # type: ignore[arg-type]
        assert [one.index for one in answer.data] == [0, 1]
        for one in answer.data:
            assert np.allclose(one.embedding, VALUES, atol=1e-7)
        assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (14, 14)
        assert answer.model == "tiny"
    assert [request.prompt for request in generator.embedding_requests[:2]] == ["a", "b"]
    assert all(request.dimensions is None for request in generator.embedding_requests)


@pytest.mark.parametrize(
    ("given", "prompts"),
    [("a", ["a"]), ([1, 2], [(1, 2)]), ([[1, 2], [3]], [(1, 2), (3,)]), (["a", [3]], ["a", (3,)])],
)
async def test_every_form_of_input(
    http: httpx.AsyncClient, generator: FakeGenerator, given: Any, prompts: list[Any]
) -> None:
    body = {"input": given, "dimensions": 2, "priority": 3, "cache_salt": "s", "request_id": "r"}
    answer = await http.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    assert [request.prompt for request in generator.embedding_requests] == prompts
    assert {request.dimensions for request in generator.embedding_requests} == {2}
    assert {(r.priority, r.cache_salt) for r in generator.embedding_requests} == {(3, "s")}
    many = len(prompts) > 1
    names = [f"r-{i}" for i in range(len(prompts))] if many else ["r"]
    assert [request.request_id for request in generator.embedding_requests] == names


async def test_a_few_inputs_run_at_a_time(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    """2,048 inputs would fill the queue."""
    answer = await http.post("/v1/embeddings", json={"input": ["a"] * 2048})
    assert len(answer.json()["data"]) == 2048
    assert generator.most_at_once == 64
