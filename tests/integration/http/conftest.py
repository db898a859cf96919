"""The HTTP server on a real socket, with a generator that always answers the same."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import httpx
import openai
import pytest
from prometheus_client import CollectorRegistry, Counter

from quire.types import RetainAnswer, Usage
from services.gateway.access.caller import Caller
from services.gateway.api import (
    Embedded,
    EmbeddingRequest,
    GenerationRequest,
    RetainDirective,
    RetainedPrefix,
    ServedModel,
    Tokenized,
)
from services.gateway.http.app import create_app
from services.gateway.http.server import http_server
from services.gateway.output.delta import Delta
from services.protocol.ticket import FinishReason

LIMIT_S = 10
TEXTS = ["The", " block", " tables"]
HI = {"messages": [{"role": "user", "content": "Hi"}]}


class FakeGenerator:
    """Generates `TEXTS`, a token each, unless told otherwise, within the limits of API keys.
    `pause_at`: the delta before which it waits until it is closed; `delay_s`: the time before the
    first delta; `is_endless`: it repeats the first text."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []
        self.tokenize_requests: list[GenerationRequest] = []
        self.refusals: list[tuple[str, str]] = []
        self.error: Exception | None = None
        self.error_at = 0
        self.embedding_requests: list[EmbeddingRequest] = []
        self.is_cross_encoder = False
        self.vectors: dict[object, tuple[float, ...]] = {}
        self.pause_at: int | None = None
        self.delay_s = 0.0
        self.is_endless = False
        self.num_deltas = 0
        self.num_running = self.most_at_once = 0
        self.paused = asyncio.Event()
        self.closed = asyncio.Event()
        self.is_ready = self.has_workers = True
        self.num_cached_tokens: int | None = 4
        self.num_drafts = (0, 0)  # accepted, rejected
        self.finish_reason = "stop"

    @asynccontextmanager
    async def generate(self, request: GenerationRequest) -> AsyncIterator[AsyncIterator[Delta]]:
        admitted = request.caller.account.admitted
        with admitted(request.sampling, is_further=request.is_further):
            async with aclosing(self.deltas(request)) as deltas:
                yield deltas

    async def deltas(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        self.requests.append(request)
        self.has_workers = True  # if there were none, it waited for them
        self.num_running += 1
        self.most_at_once = max(self.most_at_once, self.num_running)
        try:
            await asyncio.sleep(self.delay_s)
            while self.is_endless:
                self.num_deltas += 1
                yield self._delta(request, 0, TEXTS[0], 0)
                await asyncio.sleep(0)
            for position, text in enumerate(TEXTS):
                if self.error is not None and position == self.error_at:
                    raise self.error
                if position == self.pause_at:
                    self.paused.set()
                    await asyncio.Event().wait()
                for index in range(request.sampling.n):
                    yield self._delta(request, position, text, index)
        finally:
            self.num_running -= 1
            self.closed.set()

    def _delta(self, request: GenerationRequest, position: int, text: str, index: int) -> Delta:
        n, last = request.sampling.n, position == len(TEXTS) - 1
        is_end = last and index == n - 1
        num_generated = n * position + index + 1
        retained = tuple(map(_retained, request.retain))
        counts = self.num_cached_tokens, num_generated, 1.5, 0, *self.num_drafts
        usage = Usage(7, *counts, num_written_tokens=2, retained=retained)
        return Delta(
            request.request_id,
            index,
            (100 + position,),
            text,
            FinishReason(self.finish_reason) if last else None,
            "END" if last else None,
            usage if is_end or request.running_usage else None,
        )

    async def embed(self, request: EmbeddingRequest) -> Embedded:
        self.embedding_requests.append(request)
        generated = GenerationRequest(request.prompt, is_further=request.is_further)
        async with self.generate(generated) as deltas:
            *_, last = [delta async for delta in deltas]
        assert last.usage is not None
        values = self.vectors.get(request.prompt, (0.6, -0.8))
        return Embedded(request.request_id, values, last.usage)

    async def retain(self, request: GenerationRequest) -> RetainAnswer:
        self.requests.append(request)
        return _retained(request.retain[0])

    async def retained(self, caller: Caller) -> tuple[RetainedPrefix, ...]:
        return (RetainedPrefix("p", caller.tenant, "org/tiny", "pool-1", 32, None, 9.0),)

    async def drop_retained(self, name: str, caller: Caller, tenant: str | None = None) -> bool:
        return name == "a/b" and tenant == "acme"

    async def scores_pairs(self, model: str, request_id: str) -> bool:
        return self.is_cross_encoder

    async def tokenize(self, request: GenerationRequest, *, with_tokens: bool = False) -> Tokenized:
        if self.error is not None:
            raise self.error
        self.tokenize_requests.append(request)
        tokens = ("Hi", "!") if with_tokens else None
        return Tokenized((1, 2), tokens, max_model_len=512)

    async def detokenize(self, token_ids: tuple[int, ...], model: str) -> str:
        return f"{len(token_ids)} tokens"

    def record_refusal(self, request_id: str, model: str, code: str, reason: str) -> None:
        assert request_id
        self.refusals.append((code, reason))

    def explain(self, request_id: str, caller: Caller) -> list[str]:
        return [f"Request {request_id} came."]

    async def forecast(self, request: GenerationRequest) -> list[str]:
        return ["It would come."]

    def models(self) -> tuple[ServedModel, ...]:
        return (ServedModel("org/tiny", 512, 16, "float32"),) * self.has_workers

    def ready(self) -> bool:
        return self.is_ready


def _retained(asked: RetainDirective) -> RetainAnswer:
    return RetainAnswer(asked.name or "auto", "clipped", 6, 4, asked.ttl_s, "no room")


@pytest.fixture
def generator() -> FakeGenerator:
    return FakeGenerator()


@pytest.fixture
async def url(generator: FakeGenerator) -> AsyncIterator[str]:
    metrics = CollectorRegistry()
    Counter("quire:prompt_tokens", "of all", registry=metrics).inc(7)
    async with http_server(create_app(generator, metrics), "127.0.0.1", 0, grace_s=1) as port:
        yield f"http://127.0.0.1:{port}"


@asynccontextmanager
async def asking(generator: FakeGenerator, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an app with these options."""
    app = create_app(generator, CollectorRegistry(), **options)
    async with http_server(app, "127.0.0.1", 0, grace_s=1) as port:
        url = f"http://127.0.0.1:{port}"
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S, trust_env=False) as client:
            yield client


@pytest.fixture
def port(url: str) -> int:
    return int(url.rpartition(":")[2])


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
