"""Answers a file of requests in OpenAI's batch format (`quire batch`): one JSON object in, one out,
for each request.

The answers are the same as the HTTP API's. A run that was cut off continues where it stopped: a
request with an answer in the output file is not computed again.
"""

import json
import os
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field, field_validator
from tqdm import tqdm

from services.gateway.http.answering.answer import COMPLETIONS
from services.gateway.http.answering.in_order import in_order
from services.gateway.http.answering.merge import merged
from services.gateway.http.bodies.reading import checked
from services.gateway.http.failures import error_response
from services.offline.llm import LLM
from services.runtime.errors import InvalidRequest

if TYPE_CHECKING:
    from services.offline.engine import OfflineEngine

_ID = "batch_req_"
_BEGINNING = f'{{"id": "{_ID}'.encode()
"""With this each line of an output file begins."""


class BatchError(Exception):
    """A file is not usable. The text names the file, the line and what is wrong."""


def answer_file(input_file: Path, output_file: Path, model: str, **settings: Any) -> int:
    """Answer the requests that have no answer yet; returns how many answers of the output file are
    errors, those of earlier runs too. Raises BatchError, and QuireError if the model cannot run
    here."""
    requests = read_requests(input_file)
    answered = earlier_answers(output_file, requests)
    left = [request for request in requests if request.custom_id not in answered]
    try:
        output = output_file.open("ab", buffering=0)
    except OSError as error:
        raise BatchError(f"{output_file}: {error.strerror}") from error
    bar = tqdm(total=len(requests), initial=len(answered), desc="Batch")
    with output, LLM(model, **settings) as llm, bar:
        answer = partial(answer_whole, llm.engine)
        num_failed = llm.run(run_batch(answer, left, output, llm.num_at_once, bar.update))
    failed_before = sum(answered.values())
    print(
        f"{len(left)} answered, {num_failed} of them with an error; {len(answered)} before, "
        f"{failed_before} of them with an error"
    )
    return num_failed + failed_before


class BatchRequest(BaseModel, frozen=True):
    custom_id: str = Field(min_length=1)
    method: Literal["POST"] = "POST"
    url: Literal["/v1/chat/completions", "/v1/completions"]
    body: dict[str, Any]

    @field_validator("body")
    @classmethod
    def _check_body(cls, body: dict[str, Any]) -> dict[str, Any]:
        if body.get("stream"):
            raise ValueError("stream is set: a batch has whole answers")
        return body


def read_requests(path: Path) -> list[BatchRequest]:
    """All requests of an input file, checked before any is computed. Raises BatchError."""
    requests: dict[str, BatchRequest] = {}
    for number, value in _lines(path):
        try:
            request = checked(value, BatchRequest)
        except InvalidRequest as error:
            raise BatchError(f"{path}, line {number}: {error}") from error
        if request.custom_id in requests:
            raise BatchError(
                f"{path}, line {number}: custom_id {request.custom_id!r} is there twice"
            )
        requests[request.custom_id] = request
    if not requests:
        raise BatchError(f"{path} has no requests")
    return list(requests.values())


def earlier_answers(path: Path, requests: Iterable[BatchRequest]) -> dict[str, bool]:
    """The requests whose answers an output file has already, by id, and whether each answer is an
    error. Cuts off a last line that is not complete. Raises BatchError, and leaves the file as it
    is, if it has anything else than answers to these requests."""
    if not path.exists():
        return {}
    content = _content(path)
    end = content.rfind(b"\n") + 1
    known = {request.custom_id for request in requests}
    answered = {}
    for number, value in _lines(path, end):
        if not isinstance(value, dict) or not isinstance(value.get("response"), dict):
            raise BatchError(f"{path}, line {number}: not an answer; name another output file")
        custom_id = value.get("custom_id")
        if custom_id not in known:
            raise BatchError(
                f"{path}, line {number}: an answer to {custom_id!r}, which is no request of this "
                "batch; name another output file"
            )
        answered[custom_id] = value["response"].get("status_code") != 200
    begun = content[end:]
    if not begun.startswith(_BEGINNING[: len(begun)]):
        raise BatchError(f"{path}: its end is no answer; name another output file")
    os.truncate(path, end)
    return answered


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise BatchError(f"{path}: {error.strerror}") from error


def _lines(path: Path, end: int | None = None) -> Iterator[tuple[int, Any]]:
    """The lines of the first `end` bytes, parsed, without empty ones."""
    for number, line in enumerate(_content(path)[:end].splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield number, json.loads(line)
        except ValueError as error:
            raise BatchError(f"{path}, line {number}: {error}") from error


async def run_batch(
    answer: Callable[[BatchRequest], Awaitable[tuple[int, Any]]],
    requests: Iterable[BatchRequest],
    output: FileIO,
    num_at_once: int,
    on_answer: Callable[[], object],
) -> int:
    """Compute the requests, `num_at_once` at a time, and write each answer when it is there.
    Returns how many failed. Raises BatchError if an answer cannot be written."""

    async def has_failed(request: BatchRequest) -> bool:
        status, body = await answer(request)
        line = {
            "id": f"{_ID}{secrets.token_hex(12)}",
            "custom_id": request.custom_id,
            "response": {"status_code": status, "request_id": request.custom_id, "body": body},
            "error": None,
        }
        _write(output, json.dumps(line).encode() + b"\n")
        on_answer()
        return status != 200

    return sum(await in_order(has_failed, requests, num_at_once))


def _write(output: FileIO, line: bytes) -> None:
    try:
        while line:
            line = line[output.write(line) :]
    except OSError as error:
        raise BatchError(f"{output.name}: {error.strerror}") from error


async def answer_whole(engine: "OfflineEngine", request: BatchRequest) -> tuple[int, Any]:
    """The status and the JSON body with which the HTTP API answers a request."""
    names: Mapping[str, str] = {}
    kind, form = COMPLETIONS[request.url]
    try:
        body = checked(request.body, kind)
        names = body.names
        answer = form(body, secrets.token_hex(12), lambda: body.model or engine.spec.model)
        return 200, await answer.whole(merged(list(map(engine.generate, body.requests("")))))
    except Exception as error:
        response = error_response(error, names)
        return response.status_code, json.loads(bytes(response.body))
