"""Reads a request's body: strict JSON, every field checked and every mistake named. How large it
may be is for `services.gateway.http.bodies`."""

from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import from_json
from starlette.requests import Request

from services.common.errors import InvalidRequest
from services.gateway.http.failures import InvalidField

_MAX_PROBLEMS = 5

M = TypeVar("M", bound=BaseModel)


async def read_body(request: Request, model: type[M]) -> M:
    """InvalidRequest names what is wrong."""
    # Not `request.body()`, which keeps it as long as the answer takes.
    fields = _parsed(b"".join([part async for part in request.stream()]))
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _invalid(error) from error


def _parsed(content: bytes) -> dict[str, Any]:
    try:
        fields = from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidRequest("the body is not a JSON object")
    return fields


def _invalid(error: ValidationError) -> InvalidField:
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    texts = [_text(problem["loc"], problem["type"], problem["msg"]) for problem in problems]
    shown = texts[:_MAX_PROBLEMS] + ["..."] * (len(texts) > _MAX_PROBLEMS)
    return InvalidField("; ".join(shown), param=_path(problems[0]["loc"]) or None)


def _text(location: tuple[int | str, ...], kind: str, message: str) -> str:
    path = _path(location)
    if kind == "extra_forbidden":
        return f"{path} is not supported"
    message = message.removeprefix("Value error, ")
    return f"{path}: {message}" if path else message


def _path(location: tuple[int | str, ...]) -> str:
    """`messages[0].content`."""
    steps = [f"[{step}]" if isinstance(step, int) else f".{step}" for step in location]
    return "".join(steps).removeprefix(".")
