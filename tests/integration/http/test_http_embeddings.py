"""/v1/embeddings in OpenAI's shape, as OpenAI's own client reads it."""

from typing import Any

import httpx
import numpy as np
import openai
import pytest

from services.runtime.errors import PromptTooLong, QueueFull

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


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "input: Field required"),
        ({"input": 3}, "input: must be text, token ids, or a list of either"),
        ({"input": ["a", 3]}, "input: must be text, token ids, or a list of either"),
        ({"input": ["a"] * 2049}, "input: 2049 prompts, at most 2048"),
        ({"input": "a", "dimensions": 0}, "dimensions: Input should be greater than or equal to 1"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format: Input should be"),
        ({"input": "a", "truncate_prompt_tokens": "5"}, "truncate_prompt_tokens: Input should be"),
        ({"input": "a", "truncation_side": "middle"}, "truncation_side: Input should be 'left'"),
    ],
)
async def test_a_bad_body_is_refused(
    http: httpx.AsyncClient, generator: FakeGenerator, body: dict[str, Any], problem: str
) -> None:
    answer = await http.post("/v1/embeddings", json=body)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]
    assert not generator.embedding_requests


@pytest.mark.parametrize(
    ("error", "status"), [(PromptTooLong("too long", "prompt"), 400), (QueueFull("full", 2.0), 429)]
)
async def test_an_error_of_one_input_is_that_of_the_call(
    http: httpx.AsyncClient, generator: FakeGenerator, error: Exception, status: int
) -> None:
    generator.error = error
    answer = await http.post("/v1/embeddings", json={"input": ["a", "b"]})
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["param"] == "input"


async def test_a_few_inputs_run_at_a_time(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    """2,048 inputs would fill the queue."""
    answer = await http.post("/v1/embeddings", json={"input": ["a"] * 2048})
    assert len(answer.json()["data"]) == 2048
    assert generator.most_at_once == 64
