"""Reads a recorded workload: how many tokens each request had, and how many it shared with others.

A workload file has JSON lines, one for each request, in any order:

    {"num_prompt_tokens": 812, "num_generated_tokens": 128, "arrival_s": 12.5,
     "prefix": "support", "num_shared_tokens": 700}

`arrival_s` may count from any time; without it, the order of the lines is the order of arrival.
Prompts with the same `prefix` begin alike: two of them share as many tokens as the smaller of their
`num_shared_tokens`.

A gateway's log in JSON is a workload, too: its `request_ended` lines count. They do not say which
prompts shared a prefix, only how many tokens of each prompt were cached, a multiple of the block
size at that time. Requests with equally many cached tokens count as sharing them.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import pydantic.dataclasses
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from quire.errors import QuireError

_REQUEST_ENDED = "request_ended"
_MOST_TOKENS = 1 << 24  # more than any context

_Count = Annotated[int, Field(ge=0, le=_MOST_TOKENS, strict=True)]
_Seconds = Annotated[float, Field(gt=-1e12, lt=1e12, strict=True)]


class WorkloadError(QuireError):
    """The file does not exist or contains no workload; the text has the line and the reason."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "workload")


@pydantic.dataclasses.dataclass(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class RecordedRequest:
    """One recorded request. It shares its first `num_shared_tokens` with other requests of the same
    `prefix`, or with none if that is empty."""

    num_prompt_tokens: Annotated[_Count, Field(ge=1)]
    num_generated_tokens: Annotated[_Count, Field(ge=1)]
    arrival_s: _Seconds = 0.0
    prefix: str = ""
    num_shared_tokens: _Count = 0

    def __post_init__(self) -> None:
        if self.num_shared_tokens and not self.prefix:
            raise ValueError("num_shared_tokens without a prefix")
        if self.num_shared_tokens > self.num_prompt_tokens:
            raise ValueError("num_shared_tokens is more than the prompt's tokens")

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_generated_tokens


class _Ended(BaseModel):
    """A `request_ended` line of a gateway's log."""

    num_prompt_tokens: _Count
    num_generated_tokens: _Count
    num_cached_tokens: _Count
    num_sequences: _Count = 1
    timestamp: datetime
    duration_ms: _Seconds

    def request(self) -> RecordedRequest | None:
        """Return None for a request without tokens, and for a request of several sequences, since
        the log does not have their lengths."""
        if not (self.num_prompt_tokens and self.num_generated_tokens) or self.num_sequences != 1:
            return None
        num_cached = min(self.num_cached_tokens, self.num_prompt_tokens)
        arrival_s = self.timestamp.timestamp() - self.duration_ms / 1000
        prefix = f"{num_cached} tokens" if num_cached else ""
        return RecordedRequest(
            self.num_prompt_tokens, self.num_generated_tokens, arrival_s, prefix, num_cached
        )


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests in order of arrival."""

    requests: tuple[RecordedRequest, ...]
    is_log: bool = False
    """Whether the requests come from a gateway's log."""
    num_skipped: int = 0
    """The number of requests of the log that are left out."""


def read_workload(path: Path) -> Workload:
    """Read a workload file or a gateway's log. Raises WorkloadError."""
    try:
        with path.open(encoding="utf-8") as lines:
            return _workload(path, lines)
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: not text: {error}") from error


def _workload(path: Path, lines: Iterable[str]) -> Workload:
    """Only a log has events, and only a log may contain lines (a traceback) that are neither an
    event nor a request."""
    found: list[RecordedRequest | None] = []
    is_log, problem = False, None
    for number, line in enumerate(lines, 1):
        try:
            fields = _object(line) if line.strip() else {"event": None}
            if "event" not in fields:
                found.append(RecordedRequest(**fields))
            elif fields["event"] == _REQUEST_ENDED:
                found.append(_Ended.model_validate(fields).request())
            is_log = is_log or fields.get("event") is not None
        except ValueError as error:
            wrong = WorkloadError(f"{path}, line {number}: {_reason(error)}")
            if _REQUEST_ENDED in line:
                raise wrong from error
            problem = problem or wrong
    if problem and not is_log:
        raise problem
    requests = [each for each in found if each is not None]
    if not requests:
        none = f"a log in which none of {len(found)} requests counts" if is_log else "empty"
        raise WorkloadError(f"{path}: {none}")
    in_order = sorted(requests, key=lambda asked: asked.arrival_s)
    return Workload(tuple(in_order), is_log, len(found) - len(requests))


def _object(line: str) -> dict[str, Any]:
    """The JSON object of a line; `docker compose logs` writes a name before it. ValueError."""
    try:
        value = json.loads(line[max(line.find("{"), 0) :])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


def _reason(error: ValueError) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    first = error.errors()[0]
    if first["type"] == "unexpected_keyword_argument":
        return f"{first['loc'][0]!r} is not a field of a request"
    return ": ".join([*map(str, first["loc"]), first["msg"].removeprefix("Value error, ")])
