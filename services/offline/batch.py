"""Runs a file of requests in OpenAI's batch format: one JSON object in, one out, for each request.

The answers are those of the HTTP API. A run that was cut off continues where it stopped: requests
whose answers are in the output file are not computed again.
"""

import asyncio
import errno
import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from starlette.types import ASGIApp, Message

_ID = "batch_req_"
_BEGINNING = f'{{"id": "{_ID}'.encode()
"""With this each line of an output file begins."""
_URLS = ("/v1/chat/completions", "/v1/completions")


class BatchError(Exception):
    """A file is not usable. The text names the file, the line and what is wrong."""


@dataclass(frozen=True, slots=True)
class BatchRequest:
    custom_id: str
    url: str
    body: dict[str, Any]


def read_requests(path: Path) -> list[BatchRequest]:
    """All requests of an input file, checked before any is computed. Raises BatchError."""
    requests: dict[str, BatchRequest] = {}
    for number, value in _lines(path):
        problem = _problem(value)
        if problem is None and value["custom_id"] in requests:
            problem = f"custom_id {value['custom_id']!r} is there twice"
        if problem is not None:
            raise BatchError(f"{path}, line {number}: {problem}")
        request = BatchRequest(value["custom_id"], value["url"], value["body"])
        requests[request.custom_id] = request
    if not requests:
        raise BatchError(f"{path} has no requests")
    return list(requests.values())


def _problem(value: Any) -> str | None:
    if not isinstance(value, dict):
        return "not a JSON object"
    if not isinstance(value.get("custom_id"), str) or not value["custom_id"]:
        return "custom_id is not a text"
    if value.get("method") != "POST":
        return f"method is {value.get('method')!r}, not 'POST'"
    if value.get("url") not in _URLS:
        return f"url is {value.get('url')!r}, not one of {', '.join(_URLS)}"
    if not isinstance(value.get("body"), dict):
        return "body is not an object"
    return "stream is set: a batch has whole answers" if value["body"].get("stream") else None


def answered_ids(path: Path, requests: Iterable[BatchRequest]) -> set[str]:
    """The requests whose answers an output file has already. Cuts off a last line that is not
    complete. Raises BatchError, and leaves the file as it is, if it has anything else than answers
    to these requests."""
    if not path.exists():
        return set()
    content = _content(path)
    end = content.rfind(b"\n") + 1
    known = {request.custom_id for request in requests}
    answered = set()
    for number, value in _lines(path, end):
        if not isinstance(value, dict) or not isinstance(value.get("response"), dict):
            raise BatchError(f"{path}, line {number}: not an answer; name another output file")
        custom_id = value.get("custom_id")
        if custom_id not in known:
            raise BatchError(
                f"{path}, line {number}: an answer to {custom_id!r}, which is no request of this "
                "batch; name another output file"
            )
        answered.add(custom_id)
    begun = content[end:]
    if not begun.startswith(_BEGINNING[: len(begun)]):
        raise BatchError(f"{path}: its end is no answer; name another output file")
    os.truncate(path, end)
    return answered


def _content(path: Path) -> bytes:
    try:
        if not path.is_file():
            reason = os.strerror(errno.ENOENT) if not path.exists() else "not a file"
            raise BatchError(f"{path}: {reason}")
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
    app: ASGIApp,
    requests: Iterable[BatchRequest],
    output: FileIO,
    num_at_once: int,
    on_answer: Callable[[], object],
) -> int:
    """Compute the requests, `num_at_once` at a time, and write each answer when it is there.
    Returns how many failed. Raises BatchError if an answer cannot be written."""
    waiting = iter(requests)
    num_failed = 0

    async def work() -> None:
        nonlocal num_failed
        for request in waiting:
            status, body = await _post(app, request.url, json.dumps(request.body).encode())
            num_failed += status != 200
            answer = {
                "id": f"{_ID}{secrets.token_hex(12)}",
                "custom_id": request.custom_id,
                "response": {"status_code": status, "request_id": request.custom_id, "body": body},
                "error": None,
            }
            _write(output, json.dumps(answer).encode() + b"\n")
            on_answer()

    try:
        async with asyncio.TaskGroup() as tasks:
            for _ in range(num_at_once):
                tasks.create_task(work())
    except ExceptionGroup as group:
        raise group.exceptions[0] from group
    return num_failed


def _write(output: FileIO, line: bytes) -> None:
    try:
        while line:
            line = line[output.write(line) :]
    except OSError as error:
        raise BatchError(f"{output.name}: {error.strerror}") from error


async def _post(app: ASGIApp, path: str, body: bytes) -> tuple[int, Any]:
    """The status and the JSON body of the answer to a POST."""
    status, parts = 500, list[bytes]()
    incoming = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        for message in incoming:
            return message
        await asyncio.Event().wait()  # for ever: this client does not disconnect
        raise AssertionError

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    headers.append((b"content-length", str(len(body)).encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": headers,
    }
    await app(scope, receive, send)
    return status, json.loads(b"".join(parts))
