"""Reads a request's body: parses strict JSON, and checks the number of its values and all fields.

`services.gateway.http.middleware.body_limits` bounds the size of bodies.
"""

import asyncio
import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from services.gateway.http.bodies.bounds import check_counts
from services.gateway.http.bodies.fields import FieldError
from services.gateway.http.bodies.unknown_fields import INSTEAD
from services.runtime.errors import InvalidRequest

PARAM_NAMES = "param_names"
"""The entry of a request's state with its body's names of parameters."""
_MAX_PROBLEMS = 5
_INDEX = re.compile(r"\[\d+\]")

_SMALL_BYTES = 1 << 16
"""A body of at most this size is parsed in a millisecond or two, whatever it contains."""

# One thread parses large bodies one after another. So the objects of only one are in memory before
# the body is checked, and the event loop competes with only one thread for the interpreter's lock.
_parsing = ThreadPoolExecutor(1, thread_name_prefix="parse")

M = TypeVar("M", bound=BaseModel)


async def read_body(request: Request, model: type[M]) -> M:
    """The request's body, parsed and checked, whose names of parameters later errors have.
    InvalidRequest names the first mistakes."""
    # Not `request.body()`, which keeps the bytes as long as the answer takes.
    content = b"".join([part async for part in request.stream()])
    if len(content) <= _SMALL_BYTES:
        body = _validated(content, model)
    else:
        loop = asyncio.get_running_loop()
        body = await loop.run_in_executor(_parsing, _validated, content, model)
    request.scope.setdefault("state", {})[PARAM_NAMES] = getattr(body, "names", {})
    return body


def _validated(content: bytes, model: type[M]) -> M:
    if len(content) > _SMALL_BYTES:
        check_counts(content)
    return checked(_parsed(content), model)


def checked(fields: dict[str, Any], model: type[M]) -> M:
    """The fields of a body as `model`. InvalidRequest names the first mistakes."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error, fields) from error


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        fields = from_json(content.removeprefix(BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("the body is not a JSON object")
    return fields


def _invalid(error: ValidationError, body: dict[str, Any]) -> InvalidRequest:
    problems = error.errors(include_url=False, include_input=False)
    paths = [_path(_location(problem["loc"], problem["type"], body)) for problem in problems]
    texts = [
        _text(path, problem["type"], problem["msg"])
        for path, problem in zip(paths, problems, strict=True)
    ]
    shown = texts[:_MAX_PROBLEMS] + ["..."] * (len(texts) > _MAX_PROBLEMS)
    param, cause = paths[0], problems[0].get("ctx", {}).get("error")
    if isinstance(cause, FieldError):
        param = f"{param}.{cause.param}".removeprefix(".")
    return InvalidRequest("; ".join(dict.fromkeys(shown)), param=param or None)


def _location(steps: tuple[int | str, ...], kind: str, body: Any) -> Iterator[int | str]:
    """The location of a problem, without the names of a union's members, which pydantic adds and
    no body has."""
    for at, step in enumerate(steps):
        try:
            body = body[step]
        except (LookupError, TypeError):
            if kind != "missing" or at < len(steps) - 1:
                continue
        yield step


def _text(path: str, kind: str, message: str) -> str:
    if kind == "extra_forbidden":
        instead = INSTEAD.get(_INDEX.sub("", path))
        return f"{path} is not supported" + (f"; use {instead}" if instead else "")
    message = message.removeprefix("Value error, ")
    return f"{path}: {message}" if path else message


def _path(location: Iterable[int | str]) -> str:
    """The location of a field, for example `messages[0].content`."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in location]
    return "".join(steps).removeprefix(".")
