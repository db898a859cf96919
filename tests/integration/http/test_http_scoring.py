"""/v1/score and /v1/rerank: which texts are compared with which, the order of the results, and
refusals."""

from typing import Any

import httpx
import pytest

from services.runtime.errors import PromptTooLong

from .conftest import FakeGenerator

RANKED = {"query": "east", "documents": ["north", {"text": "east"}, "northeast", "west"]}
USAGE = {"prompt_tokens": 35, "total_tokens": 35}


@pytest.fixture(autouse=True)
def vectors(generator: FakeGenerator) -> None:
    generator.vectors = {
        "east": (1.0, 0.0),
        "west": (-1.0, 0.0),
        "north": (0.0, 1.0),
        "northeast": (0.6, 0.8),
    }


@pytest.mark.parametrize("path", ["/v1/score", "/score"])
@pytest.mark.parametrize("names", [("text_1", "text_2"), ("queries", "documents")])
@pytest.mark.parametrize(
    ("one", "other", "scores"),
    [
        ("east", "northeast", [0.6]),
        ("east", ["west", "north", "east"], [-1.0, 0.0, 1.0]),
        (["east", "north"], ["east", "northeast"], [1.0, 0.8]),
    ],
)
async def test_pairs_are_scored(
    http: httpx.AsyncClient, path: str, names: tuple[str, str], one: Any, other: Any, scores: Any
) -> None:
    answer = (await http.post(path, json=dict(zip(names, (one, other), strict=True)))).json()
    assert [(each["index"], each["score"]) for each in answer["data"]] == list(enumerate(scores))
    assert (answer["object"], answer["data"][0]["object"]) == ("list", "score")


@pytest.mark.parametrize("path", ["/v1/rerank", "/rerank", "/v2/rerank"])
async def test_documents_are_ranked(http: httpx.AsyncClient, path: str) -> None:
    answer = (await http.post(path, json=RANKED)).json()
    assert answer["results"] == [
        {"index": 1, "document": {"text": "east"}, "relevance_score": 1.0},
        {"index": 2, "document": {"text": "northeast"}, "relevance_score": 0.6},
        {"index": 0, "document": {"text": "north"}, "relevance_score": 0.0},
        {"index": 3, "document": {"text": "west"}, "relevance_score": -1.0},
    ]
    assert answer["usage"] == USAGE
    body = {**RANKED, "top_n": 1, "return_documents": False}
    (best,) = (await http.post(path, json=body)).json()["results"]
    assert best == {"index": 1, "relevance_score": 1.0}


async def test_options_reach_every_text(http: httpx.AsyncClient, generator: FakeGenerator) -> None:
    more = {"truncate_prompt_tokens": 5, "cache_salt": "s", "priority": 2, "model": "org/tiny"}
    await http.post("/v1/rerank", json=RANKED | more)
    asked = generator.embedding_requests
    assert {(r.cache_salt, r.priority, r.model, r.is_further) for r in asked[1:]} == {
        ("s", 2, "org/tiny", True)
    }
    assert [request.prompt for request in asked] == ["east", "north", "east", "northeast", "west"]
    assert {request.truncation and request.truncation.side for request in asked} == {"right"}


@pytest.mark.parametrize(
    ("path", "body", "problem"),
    [
        ("score", {}, "give text_1 and text_2, or queries and documents"),
        ("score", {"text_1": "a", "documents": "b"}, "give text_1 and text_2, or"),
        ("score", {"text_1": "a", "text_2": []}, "give text_1 and text_2, or"),
        ("score", {"text_1": ["a", "b"], "text_2": ["c"] * 3}, "2 texts for 3 others"),
        ("score", {"text_1": "a", "text_2": ["b", 3]}, "text_2: must be a string or a list"),
        ("rerank", {"query": "a"}, "documents: Field required"),
        ("rerank", {"query": ["a"], "documents": ["b"]}, "query: Input should be a valid string"),
        ("rerank", {"query": "a", "documents": [{"title": "b"}]}, "documents[0]: Input should be"),
        ("rerank", {"query": "a", "documents": ["b"] * 2049}, "at most 2048 items"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n: Input should be"),
        ("rerank", {**RANKED, "max_tokens_per_doc": 9}, "use truncate_prompt_tokens"),
    ],
)
async def test_a_bad_body_is_refused(
    http: httpx.AsyncClient, generator: FakeGenerator, path: str, body: Any, problem: str
) -> None:
    answer = await http.post(f"/v1/{path}", json=body)
    assert answer.status_code == 400
    assert problem in answer.json()["error"]["message"]
    assert not generator.embedding_requests


async def test_an_error_of_one_text_is_that_of_the_call(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    generator.error = PromptTooLong("too long", "prompt")
    answer = await http.post("/v1/rerank", json=RANKED)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "documents")
