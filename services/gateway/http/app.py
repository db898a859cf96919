"""The HTTP application: its routes, and the path of one request to the generator and back."""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from http import HTTPStatus
from importlib.metadata import version
from typing import Any, TypeVar

from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from services.gateway.access.keyring import Keyring
from services.gateway.api import Generator, ServedModel
from services.gateway.http.answering.answer import COMPLETIONS, Answer
from services.gateway.http.answering.in_order import in_order
from services.gateway.http.answering.logprobs import JSON
from services.gateway.http.answering.merge import merged
from services.gateway.http.answering.sending import (
    CLIENT_GONE,
    DEFAULT_STREAM_PING_S,
    EventStream,
    Json,
    unless_disconnected,
)
from services.gateway.http.bodies.reading import read_body
from services.gateway.http.bodies.schema import SampledBody
from services.gateway.http.cache import CacheEndpoints
from services.gateway.http.embeddings import AT_ONCE, EmbeddingBody, PooledBody
from services.gateway.http.failures import (
    ANTHROPIC_VERSION,
    REQUEST_ID_HEADER,
    RequestIdAndErrors,
    answer_http_exception,
    name_request,
    refusal_of,
)
from services.gateway.http.messages_api.answer import MessageAnswer
from services.gateway.http.messages_api.body import MessagesBody
from services.gateway.http.middleware.authentication import Authentication
from services.gateway.http.middleware.body_limits import (
    DEFAULT_BODY_MEMORY_BYTES,
    DEFAULT_BODY_TIMEOUT_S,
    BodyLimits,
)
from services.gateway.http.middleware.other_sites import OtherSites
from services.gateway.http.openapi import openapi_document
from services.gateway.http.responses_api.answer import ResponseAnswer
from services.gateway.http.responses_api.body import ResponsesBody
from services.gateway.http.scoring import POOLED, RerankBody, ScoreBody
from services.gateway.http.tokens import TokenEndpoints
from services.runtime.errors import InvalidRequest, UnknownModel
from services.runtime.exposition import exposition
from services.runtime.tracing.context import TRACEPARENT

TIMEOUT_HEADER = "X-Quire-Timeout-S"
"""A client's deadline, in seconds from now, like the deadline of a gRPC call."""

MAX_TIMEOUT_S = 7 * 24 * 3600

VERSION = version("quire-serve")

Body = TypeVar("Body", bound=SampledBody | PooledBody)
Form = Callable[..., Answer | ResponseAnswer | MessageAnswer]
_GENERATED: Mapping[str, tuple[type[SampledBody], Form]] = {
    **COMPLETIONS,
    "/v1/responses": (ResponsesBody, ResponseAnswer),
    "/v1/messages": (MessagesBody, MessageAnswer),
}
"""The bodies of the paths that generate text, and what makes the answer to each."""


def create_app(
    generator: Generator,
    metrics: Collector,
    allowed_hosts: Sequence[str] = (),
    max_body_memory_bytes: int = DEFAULT_BODY_MEMORY_BYTES,
    more_routes: Sequence[Route] = (),
    keyring: Keyring | None = None,
    cors_origins: Sequence[str] = (),
    body_timeout_s: float = DEFAULT_BODY_TIMEOUT_S,
    stream_ping_s: float = DEFAULT_STREAM_PING_S,
) -> Starlette:
    """The HTTP application that serves `generator`, with `metrics` at `/metrics`.

    Requests may name `allowed_hosts`, or any if there are none. Request bodies that are being
    received have at most `max_body_memory_bytes` together (`BodyLimits`), and `body_timeout_s`
    each. `keyring` is None if API keys are off. Browsers let web pages of `cors_origins` call this
    API, where `*` is all. `stream_ping_s` is as in `EventStream`.
    """
    endpoints = _Endpoints(generator, metrics, stream_ping_s)
    tokens, cache = TokenEndpoints(generator), CacheEndpoints(generator)
    app = Starlette(
        routes=[
            *(
                Route(path, partial(endpoints.generated, kind=kind, form=form), methods=["POST"])
                for path, (kind, form) in _GENERATED.items()
            ),
            Route("/v1/messages/count_tokens", tokens.count_tokens, methods=["POST"]),
            *(
                Route(path, partial(endpoints.pooled, kind=kind), methods=["POST"])
                for path, kind in POOLED.items()
            ),
            Route("/v1/models", endpoints.models),
            Route("/v1/models/{model:path}", endpoints.model),
            Route("/v1/cache", cache.retained, methods=["GET", "POST"]),
            Route("/v1/cache/{name:path}", cache.drop, methods=["DELETE"]),
            Route("/tokenize", tokens.tokenize, methods=["POST"]),
            Route("/detokenize", tokens.detokenize, methods=["POST"]),
            Route("/health", endpoints.health),
            Route("/version", endpoints.version),
            Route("/openapi.json", endpoints.openapi),
            Route("/metrics", endpoints.metrics),
            *more_routes,
        ],
        middleware=[
            Middleware(BodyLimits, max_body_memory_bytes, body_timeout_s),
            # Outside of the errors, so that pages may read those too, and of the keys, because
            # browsers send none with the question that precedes a call.
            *([Middleware(CORSMiddleware, **_cors(cors_origins))] if cors_origins else []),
            Middleware(RequestIdAndErrors),
            # Against web pages whose own name resolves to this server's address.
            Middleware(TrustedHostMiddleware, allowed_hosts or ("*",), www_redirect=False),
            Middleware(Authentication, keyring),  # which also logs what OtherSites refuses
            Middleware(OtherSites, cors_origins),
        ],
        exception_handlers={HTTPException: answer_http_exception},
    )
    # A path with another slash at its end is not found. Starlette would redirect it to whatever
    # host the Host header names.
    app.router.redirect_slashes = False
    return app


def _cors(origins: Sequence[str]) -> dict[str, Any]:
    """The key is no cookie, so that pages of other origins cannot use the key of a user."""
    return {
        "allow_origins": origins,
        "allow_methods": ["GET", "POST", "DELETE"],
        "allow_headers": [
            *("Authorization", "Content-Type", REQUEST_ID_HEADER, TIMEOUT_HEADER, TRACEPARENT),
            *("X-Api-Key", ANTHROPIC_VERSION, "anthropic-beta"),
        ],
        "expose_headers": [REQUEST_ID_HEADER, "Retry-After", "Retry-After-Ms"],
        "max_age": 600,
    }


class _Endpoints:
    def __init__(self, generator: Generator, metrics: Collector, stream_ping_s: float) -> None:
        self._generator = generator
        self._metrics = metrics
        self._stream_ping_s = stream_ping_s
        self._scraping = asyncio.Lock()
        self._started_unix_s = int(time.time())

    async def generated(self, request: Request, kind: type[SampledBody], form: Form) -> Response:
        """The answer with generated text, as a whole or as a stream of events."""
        body, name, timeout_s = await self._read(request, kind)
        answer = form(body, name, self._model(body.model))
        deltas = merged(list(map(self._generator.generate, body.requests(name, timeout_s))))
        if not body.stream:
            return await _whole(request, answer.whole(deltas))
        return EventStream(
            answer.parts(deltas),
            answer.error_event,
            self._stream_ping_s,
            is_named=answer.is_named,
            ping=answer.ping,
        )

    async def pooled(
        self, request: Request, kind: type[EmbeddingBody | ScoreBody | RerankBody]
    ) -> Response:
        """The answer that needs the embeddings of several texts."""
        body, name, timeout_s = await self._read(request, kind)

        async def answer() -> JSON:
            left, _ = body.inputs()
            in_pairs = bool(left) and await self._generator.scores_pairs(body.model or "", name)
            requests = body.requests(name, timeout_s, in_pairs=in_pairs)
            found = await in_order(self._generator.embed, requests, AT_ONCE)
            return body.answer(found, name, self._model(body.model)())

        return await _whole(request, answer())

    async def _read(self, request: Request, kind: type[Body]) -> tuple[Body, str, float | None]:
        """The request's body, its id, and the seconds until its deadline."""
        try:
            body = await read_body(request, kind)
            timeout_s = _timeout_s(request)
        except (InvalidRequest, HTTPException) as error:
            self._generator.record_refusal(request.state.request_id, "", *refusal_of(error))
            raise
        name_request(request, body.request_id)
        return body, body.request_id or request.state.request_id, timeout_s

    def _model(self, name: str | None) -> Callable[[], str]:
        """Tells which model an answer names, once it has begun: a request without a model uses the
        only one, whose workers may come after the request."""
        served = self._generator.models
        return cache(lambda: name or next((each.root or each.id for each in served()), ""))

    async def version(self, _request: Request) -> Response:
        return Json({"version": VERSION})

    async def openapi(self, _request: Request) -> Response:
        return Json(openapi_document(VERSION))

    async def models(self, _request: Request) -> Response:
        models = [self._model_json(model) for model in self._generator.models()]
        ends = {"first_id": models[0]["id"], "last_id": models[-1]["id"]} if models else {}
        return Json({"object": "list", "data": models, "has_more": False, **ends})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        for model in self._generator.models():
            if model.id == name:
                return Json(self._model_json(model))
        raise UnknownModel(f"model {name!r} is not served")

    async def health(self, _request: Request) -> Response:
        """For load balancers: 200 while the gateway can serve requests, 503 otherwise."""
        if self._generator.ready():
            return Json({"status": "serving"})
        return Json({"status": "not_serving"}, HTTPStatus.SERVICE_UNAVAILABLE)

    async def metrics(self, request: Request) -> Response:
        async with self._scraping:
            content, content_type = await asyncio.to_thread(
                exposition, self._metrics, request.headers.get("accept", "")
            )
        return Response(content, headers={"Content-Type": content_type})

    def _model_json(self, model: ServedModel) -> dict[str, object]:
        parent = {"parent": model.parent} if model.parent else {}
        return {
            **parent,
            "id": model.id,
            "object": "model",
            "created": self._started_unix_s,
            "owned_by": "quire",
            "root": model.root or model.id,
            "max_model_len": model.max_model_len,
            "block_size": model.block_size,
            "dtype": model.dtype,
            # Anthropic's fields.
            "type": "model",
            "display_name": model.id,
            "created_at": datetime.fromtimestamp(self._started_unix_s, UTC).isoformat(),
            "max_input_tokens": model.max_model_len,
        }


async def _whole(request: Request, answer: Coroutine[Any, Any, JSON]) -> Response:
    whole = await unless_disconnected(request.receive, answer)
    return Response(status_code=CLIENT_GONE) if whole is None else Json(whole)


def _timeout_s(request: Request) -> float | None:
    text = request.headers.get(TIMEOUT_HEADER)
    if text is None:
        return None
    try:
        timeout_s = float(text)
    except ValueError:
        timeout_s = math.nan
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise InvalidRequest(
            f"{TIMEOUT_HEADER} is {text!r}, not a number of seconds above 0, at most "
            f"{MAX_TIMEOUT_S}"
        )
    return timeout_s
