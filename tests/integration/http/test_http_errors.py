"""Refusals over HTTP: errors have OpenAI's shape."""

import gzip
from typing import Any

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry

from services.gateway.http.app import create_app
from services.runtime import errors

from .conftest import HI, TEXTS, FakeGenerator, asking


@pytest.mark.parametrize(
    ("path", "body", "name", "param"),
    [
        (
            "chat/completions",
            HI | {"max_completion_tokens": 0},
            "max_tokens",
            "max_completion_tokens",
        ),
        ("responses", {"input": "Hi", "max_output_tokens": 9}, "max_tokens", "max_output_tokens"),
        ("responses", {"input": "Hi", "stream": True}, "max_tokens", "max_output_tokens"),
        ("messages", HI | {"max_tokens": 9}, "max_tokens", "max_tokens"),
        ("embeddings", {"input": ["a", "b"]}, "prompt", "input"),
        ("rerank", {"query": "a", "documents": ["b"]}, "prompt", "documents"),
    ],
)
async def test_a_refusal_names_a_parameter_as_the_body_does(
    http: httpx.AsyncClient,
    generator: FakeGenerator,
    path: str,
    body: dict[str, Any],
    name: str,
    param: str,
) -> None:
    """Also one of several inputs, and also if a stream is asked for."""
    generator.error = errors.PromptTooLong(f"you asked for 12 tokens: 3 and {name} 9", name)
    answer = await http.post(f"/v1/{path}", json=body)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert error["message"] == f"you asked for 12 tokens: 3 and {param} 9"
    assert error.get("param", param) == param


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.PromptTooLong("9 > 8"), 400, "invalid_request_error", "context_length_exceeded"),
        (errors.UnknownModel("no model m"), 404, "invalid_request_error", "model_not_found"),
        (errors.DuplicateRequest("runs"), 409, "invalid_request_error", "duplicate_request"),
        (errors.QueueFull("full", 1.2), 429, "rate_limit_error", "queue_full"),
        (errors.RateLimited("often", 19.2), 429, "rate_limit_error", "rate_limit_exceeded"),
        (errors.NoWorker("none"), 503, "server_error", "no_worker"),
        (errors.DeadlineExceeded("late"), 408, "invalid_request_error", "deadline_exceeded"),
        (RuntimeError("the secret"), 500, "server_error", "internal"),
    ],
)
async def test_errors_have_openais_shape(
    http: httpx.AsyncClient,
    generator: FakeGenerator,
    error: Exception,
    status: int,
    kind: str,
    code: str,
    stream: bool,
) -> None:
    """Also for a requested stream: before the first token an answer still has a status."""
    generator.error = error
    answer = await http.post("/v1/chat/completions", json={**HI, "stream": stream})
    assert answer.status_code == status
    body = answer.json()["error"]
    assert (body["type"], body["code"]) == (kind, code)
    assert body["param"] == ("model" if code == "model_not_found" else None)
    assert "secret" not in answer.text
    delays = {"queue_full": "2", "rate_limit_exceeded": "20", "no_worker": "1"}
    assert answer.headers.get("retry-after") == delays.get(code)


async def test_an_error_after_the_first_token_ends_the_stream(
    client: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    """The text so far stays, and then the client's own exception follows: a failed stream does not
    look like a finished one."""
    generator.error, generator.error_at = errors.Unavailable("the worker was lost"), 2
    stream = await client.completions.create(model="org/tiny", prompt="Hi", stream=True)
    texts = []
    with pytest.raises(openai.APIError, match="the worker was lost"):  # noqa: PT012
        async for part in stream:
            texts.append(part.choices[0].text)
    assert texts == TEXTS[:2]


@pytest.mark.parametrize("path", ["chat/completions", "responses"])
async def test_a_silent_stream_sends_its_headers_and_comments(
    generator: FakeGenerator, path: str
) -> None:
    """An error after the headers is the last event. OpenAI's client skips the comments."""
    generator.delay_s, generator.error = 1.2, errors.Unavailable("the worker was lost")
    async with asking(generator, stream_ping_s=0.02) as http:
        url = f"{http.base_url}/v1"
        body = {**HI, "stream": True} if "chat" in path else {"input": "Hi", "stream": True}
        answer = await http.post(f"/v1/{path}", json=body)
        async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
            stream = await client.responses.create(model="org/tiny", input="Hi", stream=True)
            with pytest.raises(openai.APIError, match="the worker was lost"):
                await anext(aiter(stream))
    assert answer.status_code == 200
    parts = answer.text.removesuffix("\n\n").split("\n\n")
    assert set(parts[:-1]) == {": ping"}
    assert "the worker was lost" in parts[-1]
    assert parts[-1].startswith("event: error\n" if path == "responses" else "data: {")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "the body is not valid JSON"),
        (b'{"prompt": "Hi", "temperature": NaN}', "the body is not valid JSON"),
        (b'{"prompt": "Hi", "suffix": "x"}', "suffix is not supported"),
        (b'{"prompt": "Hi", "n": "many"}', "n: Input should be"),
    ],
)
async def test_bad_bodies_are_refused(
    http: httpx.AsyncClient, generator: FakeGenerator, content: bytes, message: str
) -> None:
    answer = await http.post("/v1/completions", content=content)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert generator.requests == []
    assert generator.refusals == [("invalid_request", answer.json()["error"]["message"])]


GZIPPED = gzip.compress(b'{"prompt": "Hi"}', mtime=0)


@pytest.mark.parametrize(
    ("encoding", "content"),
    [("", b'\xef\xbb\xbf{"prompt": "Hi"}'), ("gzip", GZIPPED), ("identity", b'{"prompt": "Hi"}')],
)
async def test_bodies_may_have_a_byte_order_mark_or_be_gzipped(
    http: httpx.AsyncClient, generator: FakeGenerator, encoding: str, content: bytes
) -> None:
    headers = {"Content-Encoding": encoding} if encoding else {}
    answer = await http.post("/v1/completions", content=content, headers=headers)
    assert answer.status_code == 200
    assert [request.prompt for request in generator.requests] == ["Hi"]


@pytest.mark.parametrize(
    ("encoding", "content", "status", "message"),
    [
        ("gzip", b'{"prompt": "Hi"}', 400, "not valid gzip"),
        ("gzip", GZIPPED[:-9], 400, "not valid gzip: it is cut off"),
        ("gzip", GZIPPED + GZIPPED, 400, "has more behind it"),
        ("gzip", gzip.compress(bytes(40_000_000)), 413, "the body is larger than"),
        ("zstd", b"x", 415, "Content-Encoding is 'zstd'"),
    ],
)
async def test_encodings_that_cannot_be_read_are_refused(
    http: httpx.AsyncClient, encoding: str, content: bytes, status: int, message: str
) -> None:
    answer = await http.post(
        "/v1/completions", content=content, headers={"Content-Encoding": encoding}
    )
    assert answer.status_code == status
    assert message in answer.json()["error"]["message"]


async def test_a_body_of_20_mb_is_too_large(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    """The client gets to read the reason, and the server goes on."""
    answer = await http.post("/v1/completions", json={"prompt": "x" * 20_000_000})
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert [code for code, _ in generator.refusals] == ["request_too_large"]
    assert (await http.get("/health")).status_code == 200


async def test_a_prompt_of_10_mb_arrives(http: httpx.AsyncClient, generator: FakeGenerator) -> None:
    """Only the gateway decides whether it is too long."""
    answer = await http.post("/v1/completions", json={"prompt": "x" * 10_000_000})
    assert answer.status_code == 200
    assert generator.requests[0].prompt == "x" * 10_000_000


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", "/v1/completions", 405), ("GET", "/v1/models/no", 404)],
)
async def test_unknown_paths_have_the_same_shape(
    http: httpx.AsyncClient, method: str, path: str, status: int
) -> None:
    answer = await http.request(method, path)
    assert answer.status_code == status
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_no_path_with_a_slash_at_its_end_is_redirected(generator: FakeGenerator) -> None:
    """The redirect would go to whatever host the Host header names."""
    app = create_app(generator, CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        for route in app.routes:
            if route.path.startswith("/v1/cache"):  # type: ignore[attr-defined]
                continue  # the end of the path is a name
            path = route.path.replace("{model:path}", "a")  # type: ignore[attr-defined]
            method = "POST" if "POST" in route.methods else "GET"  # type: ignore[attr-defined]
            answer = await client.request(method, f"{path}/", headers={"Host": "evil.example"})
            assert answer.status_code == 404, path
            kind = "not_found_error" if "/v1/messages" in path else "invalid_request_error"
            assert answer.json()["error"]["type"] == kind


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("quire.example", True),
        ("QUIRE.example:8000", True),
        ("a.b.example.com", True),
        ("[::1]:8000", True),
        ("example.com", False),
        ("quire.example.evil", False),
        ("evil.example:8000", False),
        ("quire.example:80@evil", False),
        ("", False),
    ],
)
async def test_other_hosts_are_refused(generator: FakeGenerator, host: str, allowed: bool) -> None:
    hosts = ("quire.example", "*.example.com", "[::1]")
    async with asking(generator, allowed_hosts=hosts) as client:
        answer = await client.get("/health", headers={"Host": host})
    assert answer.status_code == (200 if allowed else 400)
