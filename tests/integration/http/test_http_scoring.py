"""/v1/score and /v1/rerank: which texts are compared with which, the order of the results, and
refusals."""

from typing import Any

import httpx
import pytest

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
