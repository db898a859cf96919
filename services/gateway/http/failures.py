"""Turns errors into answers as clients of OpenAI's or Anthropic's API expect them: a status, and
the JSON of that API."""

import math
import re
import secrets
from collections.abc import Callable, Mapping
from functools import partial
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.http.answering.sending import Json
from services.gateway.http.bodies.reading import PARAM_NAMES
from services.runtime.errors import InvalidRequest
from services.runtime.rpc.error_table import Failure, failure_of
from services.runtime.tracing.context import TRACEPARENT, bind_traceparent

REQUEST_ID_HEADER = "X-Request-Id"
ANTHROPIC_PATHS = "/v1/messages"
"""How the paths of Anthropic's API begin."""
ANTHROPIC_VERSION = "anthropic-version"
"""The header that every client of Anthropic's API sends, also to the paths of both APIs."""
_MAX_REQUEST_ID_LENGTH = 128

_CODES = {
    403: "permission_denied",
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    503: "unavailable",
}


ErrorForm = Callable[[int, str, str, str | None], dict[str, Any]]
"""Makes the JSON of an error: of its status, its code, its text, and the parameter at fault."""


def openai_error(status: int, code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """`{"error": {...}}`"""
    if status == 429:
        kind = "rate_limit_error"
    else:
        kind = "server_error" if status >= 500 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def anthropic_error(
    request_id: str, status: int, _code: str, message: str, _param: str | None = None
) -> dict[str, Any]:
    """`{"type": "error", "error": {...}}`, which is an event of a stream too. The message names the
    parameter."""
    kind = "api_error" if status >= 500 else "invalid_request_error"
    error = {"type": _ANTHROPIC_TYPES.get(status, kind), "message": message}
    return {"type": "error", "error": error, "request_id": request_id}


def _is_anthropic(scope: Scope) -> bool:
    """Whether a client of Anthropic's API sent the request."""
    return scope["path"].startswith(ANTHROPIC_PATHS) or ANTHROPIC_VERSION in Headers(scope=scope)


def _form_of(scope: Scope) -> ErrorForm:
    request_id = scope["state"]["request_id"]
    return partial(anthropic_error, request_id) if _is_anthropic(scope) else openai_error


def error_body(error: Exception, form: ErrorForm = openai_error) -> dict[str, Any]:
    """The JSON of `error`, which is the last event of a stream that failed with it."""
    return _body_of(failure_of(error), error, form)


def error_response(
    error: Exception, names: Mapping[str, str], form: ErrorForm = openai_error
) -> Json:
    """The answer to a request that failed with `error`. `names` are the request's own names of
    parameters (`SampledBody.names`)."""
    if isinstance(error, InvalidRequest) and error.param is not None and error.param in names:
        name, own = error.param, names[error.param]
        error.param = own
        error.args = (re.sub(rf"(^|and ){name} ", rf"\1{own} ", str(error), count=1),)
    failure = failure_of(error)
    headers = _retry_headers(failure.retry_delay_s)
    if failure.http_status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    return Json(_body_of(failure, error, form), failure.http_status, headers)


def _body_of(failure: Failure, error: Exception, form: ErrorForm) -> dict[str, Any]:
    param = getattr(error, "param", None)
    return form(failure.http_status, failure.code, failure.text, param)


def http_error(status: int, message: str, form: ErrorForm = openai_error) -> dict[str, Any]:
    """The JSON of a refusal by the HTTP protocol, before a request reaches Quire."""
    return form(status, _code_of(status), message, None)


def _code_of(status: int) -> str:
    return _CODES.get(status, InvalidRequest.code)


def refusal_of(error: InvalidRequest | HTTPException) -> tuple[str, str]:
    """The code and the text of a refusal, for `Generator.record_refusal`."""
    if isinstance(error, InvalidRequest):
        return error.code, str(error)
    return _code_of(error.status_code), error.detail


async def answer_http_exception(request: Request, error: Exception) -> Json:
    """Answers Starlette's own errors (unknown path or method) and a body that is too large."""
    assert isinstance(error, HTTPException)
    status, text = error.status_code, error.detail
    if text == HTTPStatus.NOT_FOUND.phrase:
        text = f"there is no {request.url.path}"
    elif status == 405:
        text = f"{request.url.path} does not support the method {request.method}"
    return Json(http_error(status, text, _form_of(request.scope)), status, error.headers)


class RequestIdAndErrors:
    """The outermost middleware: gives each request an id, binds the trace context that its client
    sent, and turns each exception into an answer.

    The answer repeats the client's X-Request-Id unchanged. The id in
    `scope["state"]["request_id"]` has a random suffix, because a proxy that retries sends the same
    id while the first attempt may still run. An endpoint that reads another id in the request's
    body puts it in that place, and the answer's header has that id.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        drawn, given = secrets.token_hex(12), _given_request_id(scope)
        request_id = f"{given}-{drawn[:8]}" if given else drawn
        scope.setdefault("state", {})["request_id"] = request_id
        bind_traceparent(Headers(scope=scope).get(TRACEPARENT, ""))
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                headers = MutableHeaders(scope=message)
                named = scope["state"]["request_id"]
                headers[REQUEST_ID_HEADER] = (given or drawn) if named == request_id else named
                if _is_anthropic(scope):
                    headers["Request-Id"] = named
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        except ClientDisconnect:
            return  # there is no client to answer
        except Exception as error:
            if started:
                raise
            names, form = scope["state"].get(PARAM_NAMES, {}), _form_of(scope)
            await error_response(error, names, form)(scope, receive, send_with_id)


def _given_request_id(scope: Scope) -> str | None:
    given = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
    return given if _can_be_header(given) else None


def name_request(request: Request, given: str | None) -> None:
    """Let the answer's header have the id that the body gives, if a header can carry it."""
    if given and _can_be_header(given):
        request.state.request_id = given


def _can_be_header(request_id: str) -> bool:
    """Whether X-Request-Id can have this id."""
    is_plain = request_id.isascii() and request_id.isprintable() and " " not in request_id
    return is_plain and 0 < len(request_id) <= _MAX_REQUEST_ID_LENGTH


def _retry_headers(delay_s: float | None) -> dict[str, str]:
    """Retry-After in whole seconds, as HTTP defines it, and Retry-After-Ms, which OpenAI's clients
    prefer."""
    if delay_s is None:
        return {}
    return {"Retry-After": str(math.ceil(delay_s)), "Retry-After-Ms": str(round(delay_s * 1000))}
