"""The HTTP front door on a real socket, as OpenAI's own client and httpx see it."""

import asyncio
import json
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry, Counter

from services.common import errors
from services.common.ticket import FinishReason
from services.gateway.api import ChatMessage, Delta, GenerationRequest, ServedModel, Usage
from services.gateway.http.app import create_app
from services.gateway.http.server import http_server

LIMIT_S = 10
TEXTS = ["The", " block", " tables"]
HI = {"messages": [{"role": "user", "content": "Hi"}]}


class FakeGenerator:
    """Says `TEXTS`, a token each, unless told otherwise. `pause_at`: the delta before which it
    waits until it is closed."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.error: Exception | None = None
        self.error_at = 0
        self.pause_at: int | None = None
        self.paused = asyncio.Event()
        self.closed = asyncio.Event()
        self.is_ready = True

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        try:
            for position, text in enumerate(TEXTS):
                if self.error is not None and position == self.error_at:
                    raise self.error
                if position == self.pause_at:
                    self.paused.set()
                    await asyncio.Event().wait()
                for index in range(request.sampling.n):
                    yield self._delta(request, position, text, index)
        finally:
            self.closed.set()

    def _delta(self, request: GenerationRequest, position: int, text: str, index: int) -> Delta:
        n, last = request.sampling.n, position == len(TEXTS) - 1
        return Delta(
            request.request_id,
            index,
            (100 + position,),
            text,
            FinishReason.STOP if last else None,
            "END" if last else None,
            Usage(7, 4, n * len(TEXTS), 1.5, 0) if last and index == n - 1 else None,
        )

    def models(self) -> tuple[ServedModel, ...]:
        return (ServedModel("org/tiny", 512, 16, "float32"),)

    def ready(self) -> bool:
        return self.is_ready


@pytest.fixture
def generator() -> FakeGenerator:
    return FakeGenerator()


@pytest.fixture
async def url(generator: FakeGenerator) -> AsyncIterator[str]:
    metrics = CollectorRegistry()
    Counter("quire:prompt_tokens", "of all", registry=metrics).inc(7)
    async with http_server(create_app(generator, metrics), "127.0.0.1", 0, grace_s=1) as port:
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
async def http(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False) as client:
        yield client


@pytest.fixture
async def client(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    transport = openai.DefaultAsyncHttpxClient(timeout=LIMIT_S, trust_env=False)
    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, http_client=transport
    ) as client:
        yield client


@asynccontextmanager
async def soon() -> AsyncIterator[None]:
    async with asyncio.timeout(LIMIT_S):
        yield


# ── answers ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_chat_completion(client: openai.AsyncOpenAI, generator: FakeGenerator) -> None:
    answer = await client.chat.completions.create(
        model="org/tiny", messages=[{"role": "user", "content": "Hi"}], max_completion_tokens=9
    )
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "The block tables")
    assert (choice.finish_reason, choice.index) == ("stop", 0)
    assert choice.model_extra == {"stop_reason": "END"}
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 3)
    assert answer.usage.total_tokens == 10
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    (request,) = generator.requests
    assert request.prompt == (ChatMessage("user", "Hi"),)
    assert (request.model, request.sampling.max_tokens) == ("org/tiny", 9)
    assert answer.id == f"chatcmpl-{request.request_id}"


async def test_a_streamed_chat_completion(client: openai.AsyncOpenAI) -> None:
    """Role first, then text as it comes, the reason with the last of it, then the usage."""
    stream = await client.chat.completions.create(
        model="org/tiny",
        messages=[{"role": "user", "content": "Hi"}],
        stream=True,
        stream_options={"include_usage": True},
    )
    *parts, last = [part async for part in stream]
    assert [part.choices[0].delta.content for part in parts] == ["", *TEXTS]
    assert parts[0].choices[0].delta.role == "assistant"
    assert [part.choices[0].finish_reason for part in parts] == [None, None, None, "stop"]
    assert [part.usage for part in parts] == [None] * 4
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.total_tokens == 10


async def test_a_completion_of_token_ids(
    client: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    """With vLLM's extras, in and out."""
    answer = await client.completions.create(
        model="org/tiny",
        prompt=[5, 6],
        seed=3,
        extra_body={"return_token_ids": True, "ignore_eos": True, "request_id": "mine"},
    )
    (choice,) = answer.choices
    assert choice.text == "The block tables"
    assert choice.model_extra == {"stop_reason": "END", "token_ids": [100, 101, 102]}
    (request,) = generator.requests
    assert (request.prompt, request.sampling.seed) == ((5, 6), 3)
    assert request.sampling.ignore_eos
    assert (request.request_id, answer.id) == ("mine", "cmpl-mine")


async def test_a_streamed_completion(http: httpx.AsyncClient) -> None:
    """Byte for byte: events, their end, no usage that nobody asked for."""
    body = {"prompt": "Hi", "stream": True, "return_token_ids": True}
    answer = await http.post("/v1/completions", json=body)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    *events, done, end = answer.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    parts = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [part["choices"][0]["text"] for part in parts] == TEXTS
    assert [part["choices"][0]["token_ids"] for part in parts] == [[100], [101], [102]]
    assert parts[-1]["choices"][0]["stop_reason"] == "END"
    assert {part["model"] for part in parts} == {"org/tiny"}
    assert not any("usage" in part for part in parts)


@pytest.mark.parametrize("stream", [False, True])
async def test_several_prompts_are_choices(client: openai.AsyncOpenAI, stream: bool) -> None:
    """One of each prompt, by index; usage is of all."""
    if stream:
        texts = ["", ""]
        async for part in await client.completions.create(
            model="org/tiny", prompt=["a", "b"], stream=True
        ):
            texts[part.choices[0].index] += part.choices[0].text
    else:
        answer = await client.completions.create(model="org/tiny", prompt=["a", "b"])
        texts = [choice.text for choice in sorted(answer.choices, key=lambda c: c.index)]
        assert answer.usage is not None
        assert answer.usage.total_tokens == 20
    assert texts == ["The block tables"] * 2


@pytest.mark.parametrize("stream", [False, True])
async def test_several_samples_of_several_prompts_are_numbered_prompt_by_prompt(
    client: openai.AsyncOpenAI, generator: FakeGenerator, stream: bool
) -> None:
    texts: dict[int, str] = {}
    reasons: dict[int, str | None] = {}
    if stream:
        async for part in await client.completions.create(
            model="org/tiny", prompt=["a", "b"], n=3, stream=True
        ):
            (one,) = part.choices
            texts[one.index] = texts.get(one.index, "") + one.text
            reasons[one.index] = one.finish_reason
    else:
        answer = await client.completions.create(model="org/tiny", prompt=["a", "b"], n=3)
        assert [choice.index for choice in answer.choices] == list(range(6))
        texts = {choice.index: choice.text for choice in answer.choices}
        reasons = {choice.index: choice.finish_reason for choice in answer.choices}
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 18
    assert texts == dict.fromkeys(range(6), "The block tables")
    assert reasons == dict.fromkeys(range(6), "stop")
    assert [request.sampling.n for request in generator.requests] == [3, 3]


async def test_each_sample_of_a_streamed_chat_has_its_own_opening(
    client: openai.AsyncOpenAI,
) -> None:
    stream = await client.chat.completions.create(
        model="org/tiny", messages=[{"role": "user", "content": "Hi"}], n=2, stream=True
    )
    parts = [part.choices[0] async for part in stream]
    for index in range(2):
        mine = [part for part in parts if part.index == index]
        assert [part.delta.content for part in mine] == ["", *TEXTS]
        assert mine[0].delta.role == "assistant"
        assert mine[-1].finish_reason == "stop"


# ── errors ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind", "code"),
    [
        (errors.PromptTooLong("9 > 8"), 400, "invalid_request_error", "prompt_too_long"),
        (errors.UnknownModel("no model m"), 404, "invalid_request_error", "unknown_model"),
        (errors.DuplicateRequest("runs"), 409, "invalid_request_error", "duplicate_request"),
        (errors.QueueFull("full", 1.2), 429, "rate_limit_error", "queue_full"),
        (errors.NoWorker("none"), 503, "server_error", "no_worker"),
        (errors.DeadlineExceeded("late"), 504, "server_error", "deadline_exceeded"),
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
    """Also when a stream was asked for: before the first token there is still a status."""
    generator.error = error
    answer = await http.post("/v1/chat/completions", json={**HI, "stream": stream})
    assert answer.status_code == status
    body = answer.json()["error"]
    assert (body["type"], body["code"], body["param"]) == (kind, code, None)
    assert "secret" not in answer.text
    assert answer.headers.get("retry-after") == ("2" if code == "queue_full" else None)


async def test_the_openai_client_raises_its_own_errors(
    client: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    generator.error = errors.QueueFull("the queue is full", 1.2)
    with pytest.raises(openai.RateLimitError, match="the queue is full") as caught:
        await client.completions.create(model="org/tiny", prompt="Hi")
    assert caught.value.code == "queue_full"


async def test_an_error_after_the_first_token_ends_the_stream(
    client: openai.AsyncOpenAI, generator: FakeGenerator
) -> None:
    """The text so far stays, then the client's own exception: no end that looks like a good one."""
    generator.error, generator.error_at = errors.Unavailable("the worker was lost"), 2
    stream = await client.completions.create(model="org/tiny", prompt="Hi", stream=True)
    texts = []
    with pytest.raises(openai.APIError, match="the worker was lost"):  # noqa: PT012
        async for part in stream:
            texts.append(part.choices[0].text)
    assert texts == TEXTS[:2]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{", "the body is not valid JSON"),
        (b'{"prompt": "Hi", "temperature": NaN}', "the body is not valid JSON"),
        (b'{"prompt": "Hi", "suffix": "x"}', "suffix is not supported"),
        (b'{"prompt": "Hi", "n": "many"}', "n: Input should be"),
        (b'{"prompt": "Hi", "max_tokens": "many"}', "max_tokens: Input should be"),
    ],
)
async def test_bad_bodies_are_refused(
    http: httpx.AsyncClient, generator: FakeGenerator, content: bytes, message: str
) -> None:
    answer = await http.post("/v1/completions", content=content)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert generator.requests == []


async def test_the_wrong_field_is_the_param(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/completions", json={"prompt": "Hi", "suffix": "x"})
    assert answer.json()["error"]["param"] == "suffix"


async def test_a_body_of_20_mb_is_too_large(http: httpx.AsyncClient) -> None:
    """The client gets to read why; the service goes on."""
    answer = await http.post("/v1/completions", json={"prompt": "x" * 20_000_000})
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"
    assert (await http.get("/health")).status_code == 200


async def test_a_prompt_of_10_mb_arrives(http: httpx.AsyncClient, generator: FakeGenerator) -> None:
    """What is too long is for the gateway to say."""
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


# ── clients that go away ──────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("pause_at", [0, 2])
async def test_leaving_a_stream_closes_the_generator(
    http: httpx.AsyncClient, generator: FakeGenerator, pause_at: int
) -> None:
    """At once, while it waits for a token, the first one or a later one."""
    generator.pause_at = pause_at
    task = asyncio.create_task(http.post("/v1/completions", json={"prompt": "Hi", "stream": True}))
    async with soon():
        await generator.paused.wait()
        assert not generator.closed.is_set()
        task.cancel()
        await generator.closed.wait()


async def test_leaving_an_answer_closes_the_generator(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    generator.pause_at = 1
    task = asyncio.create_task(http.post("/v1/chat/completions", json=HI))
    async with soon():
        await generator.paused.wait()
        task.cancel()
        await generator.closed.wait()


async def test_a_reset_connection_closes_the_generator(url: str, generator: FakeGenerator) -> None:
    """A client that was killed: no goodbye, just a reset."""
    generator.pause_at = 1
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    body = json.dumps({"prompt": "Hi", "stream": True}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b"
        % (len(body), body)
    )
    async with soon():
        await reader.readuntil(b"data: ")
        await generator.paused.wait()
        raw = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        writer.transport.abort()
        await generator.closed.wait()


async def test_stopping_ends_requests_after_the_grace(generator: FakeGenerator) -> None:
    """A request that does not end by itself is cancelled, and its generator closed."""
    generator.pause_at = 1
    app = create_app(generator, CollectorRegistry())
    async with soon():
        async with http_server(app, "127.0.0.1", 0, grace_s=0) as port:
            client = httpx.AsyncClient(trust_env=False)
            url = f"http://127.0.0.1:{port}/v1/chat/completions"
            task = asyncio.create_task(client.post(url, json=HI))
            await generator.paused.wait()
        assert generator.closed.is_set()
        await asyncio.wait([task])
        assert task.exception() is not None or task.result().status_code >= 500
        await client.aclose()


# ── everything else ───────────────────────────────────────────────────────────────────────────────


async def test_models_are_listed(client: openai.AsyncOpenAI) -> None:
    (model,) = [model async for model in await client.models.list()]
    assert (model.id, model.object, model.owned_by) == ("org/tiny", "model", "quire")
    assert model.model_extra == {"max_model_len": 512, "block_size": 16, "dtype": "float32"}
    assert await client.models.retrieve("org/tiny") == model


async def test_health_follows_the_generator(
    http: httpx.AsyncClient, generator: FakeGenerator
) -> None:
    assert (await http.get("/health")).status_code == 200
    generator.is_ready = False
    assert (await http.get("/health")).status_code == 503


async def test_metrics_are_prometheus_text(http: httpx.AsyncClient) -> None:
    answer = await http.get("/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    assert "quire:prompt_tokens_total 7.0" in answer.text


async def test_the_request_id_comes_back(http: httpx.AsyncClient, generator: FakeGenerator) -> None:
    """The client's own, or one of ours; the generator gets a new one whoever tries again."""
    headers = {"X-Request-Id": "trace-1"}
    for _ in range(2):
        answer = await http.post("/v1/chat/completions", json=HI, headers=headers)
        assert answer.headers["x-request-id"] == "trace-1"
    first, second = (request.request_id for request in generator.requests)
    assert first != second
    assert first.startswith("trace-1-")
    drawn = await http.get("/health", headers={"X-Request-Id": "not usable"})
    assert len(drawn.headers["x-request-id"]) == 24


async def test_a_port_in_use_is_a_startup_error(url: str, generator: FakeGenerator) -> None:
    app, port = create_app(generator, CollectorRegistry()), int(url.rpartition(":")[2])
    with pytest.raises(errors.StartupError, match=f"HTTP: cannot listen on 127.0.0.1:{port}"):
        async with http_server(app, "127.0.0.1", port):
            pass
