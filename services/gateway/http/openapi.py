"""The document of /openapi.json: bodies from the models that check them, answers from
`answering.answer_schema`."""

import re
from functools import cache
from typing import Any

from pydantic import BaseModel, TypeAdapter
from pydantic.json_schema import models_json_schema

from services.gateway.http.answering import answer_schema
from services.gateway.http.bodies.schema import ChatBody, CompletionBody
from services.gateway.http.cache import CacheBody
from services.gateway.http.embeddings import EmbeddingBody
from services.gateway.http.failures import ANTHROPIC_PATHS
from services.gateway.http.messages_api.body import CountTokensBody, MessagesBody
from services.gateway.http.responses_api.body import ResponsesBody
from services.gateway.http.scoring import POOLED, RerankBody, ScoreBody
from services.gateway.http.tokens import DetokenizeBody, TokenizeBody

_REFERENCES = "#/components/schemas/{model}"

_POOLED = {
    EmbeddingBody: (answer_schema.Embeddings, "Embeds texts"),
    ScoreBody: (answer_schema.Scores, "Compares texts"),
    RerankBody: (answer_schema.Ranks, "Sorts texts"),
}
_OPERATIONS: tuple[tuple[str, type[BaseModel], Any, str, bool], ...] = (
    ("/v1/chat/completions", ChatBody, answer_schema.ChatCompletion, "Answers a chat", True),
    ("/v1/completions", CompletionBody, answer_schema.TextCompletion, "Continues a text", True),
    ("/v1/responses", ResponsesBody, answer_schema.Response, "Answers a chat", True),
    ("/v1/messages", MessagesBody, answer_schema.AnthropicMessage, "Answers a chat", True),
    ("/v1/messages/count_tokens", CountTokensBody, answer_schema.InputTokens, "Counts", False),
    *((path, kind, *_POOLED[kind], False) for path, kind in POOLED.items()),
    ("/v1/cache", CacheBody, answer_schema.CacheAnswer, "Retains a prefix in the cache", False),
    ("/tokenize", TokenizeBody, answer_schema.Tokens, "Tokenizes text or a chat", False),
    ("/detokenize", DetokenizeBody, answer_schema.Text, "Decodes tokens to text", False),
)
"""Path, body, answer, summary, and whether the answer can be a stream."""

_GETS: tuple[tuple[str, Any, str], ...] = (
    ("/v1/cache", answer_schema.RetainedPrefixes, "Lists the retained prefixes"),
    ("/v1/models", answer_schema.Models, "Lists the served models"),
    ("/v1/models/{model}", answer_schema.Model, "Describes a served model"),
    ("/health", answer_schema.Health, "Says whether the gateway can serve requests"),
    ("/version", answer_schema.Version, "Quire's version"),
    ("/openapi.json", dict[str, Any], "This document"),
)

_FAILURES = {
    "400": "the request is not valid",
    "404": "the model is not served",
    "408": "the client's deadline has passed, or its body came too slowly",
    "413": "the body is too large",
    "415": "the body's Content-Encoding is not served",
    "429": "too many requests wait; Retry-After says when to try again",
    "500": "an error of Quire, or a request that crashes every worker",
    "503": "no worker is there, or the gateway is stopping; Retry-After says when to try again",
}


@cache
def openapi_document(version: str) -> dict[str, Any]:
    schemas: dict[str, Any] = {}
    paths: dict[str, Any] = {}
    for path, body, answer, summary, streams in _OPERATIONS:
        content = {"schema": _of_model(body, schemas)}
        paths[path] = {
            "post": {
                "summary": summary,
                "operationId": _operation_id(path),
                "parameters": [_TIMEOUT] if streams else [],
                "requestBody": {"required": True, "content": {"application/json": content}},
                "responses": _responses(path, _of_type(answer, schemas), schemas, streams=streams),
            }
        }
    for path, answer, summary in _GETS:
        paths.setdefault(path, {})["get"] = _get(path, answer, summary, schemas)
    dropped = _get("/v1/cache/{name}", answer_schema.Dropped, "Drops a retained prefix", schemas)
    paths["/v1/cache/{name}"] = {"delete": dropped}
    # The body of a gateway that is not ready is no error.
    paths["/health"]["get"]["responses"]["503"] = paths["/health"]["get"]["responses"]["200"]
    paths["/metrics"] = {"get": _METRICS}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": version, "license": {"name": "Apache-2.0"}},
        "paths": paths,
        "components": {"schemas": schemas},
    }


def _get(path: str, answer: Any, summary: str, schemas: dict[str, Any]) -> dict[str, Any]:
    """An operation without a body."""
    parameter = re.search(r"{(\w+)}", path)
    return {
        "summary": summary,
        "operationId": ("get_" if path == "/v1/cache" else "") + _operation_id(path),
        "parameters": [{**_IN_PATH, "name": parameter[1]}] if parameter else [],
        "responses": _responses(path, _of_type(answer, schemas), schemas, streams=False),
    }


_TIMEOUT = {
    "name": "X-Quire-Timeout-S",
    "in": "header",
    "description": "seconds after which the client no longer needs the answer",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": 604800},
}
_IN_PATH = {"in": "path", "required": True, "schema": {"type": "string"}}
_METRICS = {
    "summary": "Metrics in Prometheus' formats",
    "operationId": "metrics",
    "responses": {
        "200": {
            "description": "the metrics",
            "content": {
                "text/plain": {"schema": {"type": "string"}},
                "application/openmetrics-text": {"schema": {"type": "string"}},
            },
        }
    },
}


def _responses(path: str, answer: Any, schemas: dict[str, Any], *, streams: bool) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": answer}}
    if streams:
        # Server-sent events, each with a part of the answer as its data: no schema says so.
        content["text/event-stream"] = {}
    is_anthropic = path.startswith(ANTHROPIC_PATHS)
    form = answer_schema.AnthropicFailure if is_anthropic else answer_schema.Failure
    failure = {"application/json": {"schema": _of_type(form, schemas)}}
    return {
        "200": {"description": "the answer", "content": content},
        **{status: {"description": text, "content": failure} for status, text in _FAILURES.items()},
    }


def _of_model(model: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    names, document = models_json_schema([(model, "validation")], ref_template=_REFERENCES)
    schemas.update(document["$defs"])
    return names[model, "validation"]


def _of_type(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    schema = TypeAdapter(kind).json_schema(ref_template=_REFERENCES)
    schemas.update(schema.pop("$defs", {}))
    return schema


def _operation_id(path: str) -> str:
    return path.removeprefix("/").replace("/", "_").replace("{", "").replace("}", "")
