"""/openapi.json is right: the bodies and answers of the tests match it, and it lists all routes.
The clients' tests run schemathesis over it (`tests/clients`)."""

from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator
from prometheus_client import CollectorRegistry

from services.gateway.api import ChatMessage, ServedModel
from services.gateway.http.app import create_app
from services.runtime import errors

from .conftest import HI, FakeGenerator


@pytest.fixture
async def document(http: httpx.AsyncClient) -> dict[str, Any]:
    answer = await http.get("/openapi.json")
    document: dict[str, Any] = answer.json()
    return document


def fits(document: dict[str, Any], schema: dict[str, Any], value: Any) -> bool:
    whole = {**schema, "components": document["components"]}
    return bool(Draft202012Validator(whole).is_valid(value))


def body_schema(document: dict[str, Any], path: str) -> Any:
    content = document["paths"][path]["post"]["requestBody"]["content"]
    return content["application/json"]["schema"]


def test_every_route_is_listed(generator: FakeGenerator) -> None:
    app = create_app(generator, CollectorRegistry())
    routes = {route.path.replace(":path", "") for route in app.routes}  # type: ignore[attr-defined]
    from services.gateway.http.openapi import openapi_document

    api = {path for path in routes if path != "/" and not path.startswith("/dashboard")}
    assert set(openapi_document("1")["paths"]) == api


async def test_list_with_an_adapter_fits_the_document(
    generator: FakeGenerator, http: httpx.AsyncClient, document: dict[str, Any]
) -> None:
    adapter = ServedModel("sql", 512, 16, "float32", parent="org/tiny", root="/adapters/sql")
    generator.models = lambda: (adapter,)  # type: ignore[method-assign]
    answer = (await http.get("/v1/models")).json()
    assert answer["data"][0]["parent"] == "org/tiny"
    content = document["paths"]["/v1/models"]["get"]["responses"]["200"]["content"]
    assert fits(document, content["application/json"]["schema"], answer)


BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {**HI, "logprobs": True, "top_logprobs": 2, "tools": []}),
    ("/v1/chat/completions", {**HI, "tools": [{"type": "web_search"}], "mirostat": 0, "new": 1}),
    ("/v1/completions", {"prompt": "Hi", "stop": "x", "logit_bias": {"5": 1}, "n": 2}),
    ("/v1/completions", {"prompt": [[1, 2], [3]], "logprobs": False, "return_token_ids": True}),
    ("/v1/responses", {"input": "Hi", "store": False, "text": {"format": {"type": "text"}}}),
    ("/v1/responses", {"input": [{"role": "user", "content": "Hi"}], "tools": []}),
    ("/v1/embeddings", {"input": ["Hi", "you"], "model": "tiny", "user": "me"}),
    ("/v1/embeddings", {"input": [[1, 2], [3]], "encoding_format": "base64"}),
    ("/v1/messages", {**HI, "max_tokens": 9, "system": "x", "tools": [{"type": "web_search"}]}),
    ("/v1/messages/count_tokens", {**HI, "cache_control": {"type": "ephemeral"}, "new": 1}),
    ("/v1/score", {"text_1": "a", "text_2": ["b", "c"], "truncate_prompt_tokens": 3}),
    ("/v2/rerank", {"query": "a", "documents": ["b", {"text": "c", "id": 1}], "top_n": 1}),
    ("/tokenize", {"prompt": "Hi", "return_token_strs": True}),
    ("/tokenize", HI),
    ("/detokenize", {"tokens": [1, 2]}),
]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_bodies_and_answers_fit_the_document(
    http: httpx.AsyncClient, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    assert fits(document, body_schema(document, path), body)
    answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    responses = document["paths"][path]["post"]["responses"]
    schema = responses["200"]["content"]["application/json"]["schema"]
    whole = {**schema, "components": document["components"]}
    Draft202012Validator(whole).validate(answer.json())


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "audio": {"id": "a"}}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
        ("/v1/chat/completions", {**HI, "enable_thinking": False}),
        ("/v1/chat/completions", {**HI, "tools": [{"type": "function"}]}),
        ("/v1/completions", {"prompt": 3}),
        ("/v1/completions", {"prompt": "Hi", "logit_bias": {"x": 1}}),
        ("/v1/completions", {"prompt": "Hi", "suffix": "x"}),
        ("/v1/responses", {"input": "Hi", "n": 2}),
        ("/v1/responses", {"input": "Hi", "previous_response_id": "resp_1"}),
        ("/v1/responses", {"input": [{"type": "web_search_call", "role": "user", "content": "x"}]}),
        ("/v1/messages", HI),
        ("/v1/messages", {**HI, "max_tokens": 9, "output_format": {"type": "json_schema"}}),
        ("/v1/messages/count_tokens", {"messages": [{"role": "tool", "content": "x"}]}),
        ("/v1/rerank", {"query": "a", "documents": [{"title": "b"}]}),
        ("/v1/embeddings", {"input": 3}),
        ("/v1/score", {"text_1": "a", "text_2": [3]}),
        ("/v1/cache", {"name": "p", "tokens": [1], "ttl": "2d"}),
        ("/tokenize", {"prompt": 3}),
        ("/detokenize", {"tokens": ["x"]}),
    ],
)
async def test_what_does_not_fit_the_document_is_refused(
    http: httpx.AsyncClient, document: dict[str, Any], path: str, body: dict[str, Any]
) -> None:
    assert not fits(document, body_schema(document, path), body)
    answer = await http.post(path, json=body)
    assert answer.status_code == 400
    failure = document["paths"][path]["post"]["responses"]["400"]["content"]["application/json"]
    assert fits(document, failure["schema"], answer.json())


async def test_the_version_is_told(http: httpx.AsyncClient, document: dict[str, Any]) -> None:
    version = (await http.get("/version")).json()["version"]
    assert version.count(".") == 2
    assert document["info"]["version"] == version


async def test_a_chat_and_a_text_are_tokenized(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    answer = await http.post("/tokenize", json={"prompt": "Hi!", "return_token_strs": True})
    expected = {"count": 2, "max_model_len": 512, "tokens": [1, 2], "token_strs": ["Hi", "!"]}
    assert answer.json() == expected
    await http.post("/tokenize", json={**HI, "add_generation_prompt": False})
    text, chat = generator.tokenize_requests
    assert (text.prompt, text.add_generation_prompt) == ("Hi!", True)
    assert (chat.prompt, chat.add_generation_prompt) == ((ChatMessage("user", "Hi"),), False)
    assert (await http.post("/detokenize", json={"tokens": [1]})).json() == {"prompt": "1 tokens"}


async def test_a_clients_deadline_reaches_the_generator(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    generator.error = errors.DeadlineExceeded("the request's deadline has passed")
    answer = await http.post("/v1/chat/completions", json=HI, headers={"X-Quire-Timeout-S": "1.5"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (408, "deadline_exceeded")
    assert [request.timeout_s for request in generator.requests] == [1.5]
    for wrong in ("soon", "0", "-1", "nan", "inf", "604801", "1e100"):
        answer = await http.post(
            "/v1/chat/completions", json=HI, headers={"X-Quire-Timeout-S": wrong}
        )
        assert answer.status_code == 400
