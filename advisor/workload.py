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
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

_REQUEST_ENDED = "request_ended"
_MOST_TOKENS = 1 << 24  # more than any context
_MOST_SECONDS = 1e12


class WorkloadError(Exception):
    """The file does not exist or contains no workload; the text says where and why."""


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One recorded request. It shares its first `num_shared_tokens` with other requests of the same
    `prefix`; "": with none."""

    num_prompt_tokens: int
    num_generated_tokens: int
    arrival_s: float = 0.0
    prefix: str = ""
    num_shared_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_generated_tokens


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests in order of arrival. `is_log`: they come from a gateway's log. `num_skipped`:
    requests of the log that are left out, because they got no token or had several sequences."""

    requests: tuple[RecordedRequest, ...]
    is_log: bool = False
    num_skipped: int = 0


def read_workload(path: Path) -> Workload:
    """Read a workload file or a gateway's log. WorkloadError."""
    try:
        with path.open(encoding="utf-8") as lines:
            return _workload(path, lines)
    except OSError as error:
        raise WorkloadError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{path}: not text: {error}") from error


def _workload(path: Path, lines: Iterable[str]) -> Workload:
    reader = _Reader()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            reader.add_line(line)
        except ValueError as error:
            problem = WorkloadError(f"{path}, line {number}: {error}")
            if _REQUEST_ENDED in line:
                raise problem from error
            reader.problem = reader.problem or problem
    return reader.workload(path)


@dataclass(slots=True)
class _Reader:
    """Collects the requests of a file in one pass, and finds out whether it is a workload file or a
    log: only a log has events, and only a log may contain lines (a traceback) that are neither."""

    plain: list[RecordedRequest] = field(default_factory=list)
    logged: list[RecordedRequest] = field(default_factory=list)
    num_skipped: int = 0
    is_log: bool = False
    problem: WorkloadError | None = None

    def add_line(self, line: str) -> None:
        """Add a line. ValueError: it is neither a request nor a line of a log."""
        fields = _object(line)
        if "event" not in fields:
            self.plain.append(_plain_request(fields))
            return
        self.is_log = True
        if fields["event"] == _REQUEST_ENDED:
            request = _logged_request(fields)
            self.logged += [] if request is None else [request]
            self.num_skipped += request is None

    def workload(self, path: Path) -> Workload:
        """The collected workload. WorkloadError."""
        if self.problem and not self.is_log:
            raise self.problem
        requests = self.logged if self.is_log else self.plain
        if not requests and self.is_log:
            none = f"none of its {self.num_skipped} requests" if self.num_skipped else "no request"
            raise WorkloadError(f"{path}: a log in which {none} counts")
        if not requests:
            raise WorkloadError(f"{path}: empty")
        in_order = sorted(requests, key=lambda asked: asked.arrival_s)
        return Workload(tuple(in_order), self.is_log, self.num_skipped)


def _object(line: str) -> Mapping[str, Any]:
    """The JSON object of a line; `docker compose logs` writes a name before it. ValueError."""
    begin = max(line.find("{"), 0)
    try:
        value = json.loads(line[begin:])
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value


_FIELDS = frozenset(RecordedRequest.__dataclass_fields__)


def _plain_request(fields: Mapping[str, Any]) -> RecordedRequest:
    """The request in a line of a workload file. ValueError."""
    if unknown := sorted(fields.keys() - _FIELDS):
        raise ValueError(f"{unknown[0]!r} is none of {', '.join(sorted(_FIELDS))}")
    prefix = fields.get("prefix", "")
    if not isinstance(prefix, str):
        raise ValueError(f"prefix is {prefix!r}, not a text")
    if bool(prefix) != ("num_shared_tokens" in fields):
        raise ValueError("prefix and num_shared_tokens come together")
    asked = RecordedRequest(
        _count(fields, "num_prompt_tokens"),
        _count(fields, "num_generated_tokens"),
        _seconds(fields, "arrival_s"),
        prefix,
        _count(fields, "num_shared_tokens", least=0) if prefix else 0,
    )
    if asked.num_shared_tokens > asked.num_prompt_tokens:
        raise ValueError(
            f"num_shared_tokens is {asked.num_shared_tokens}, more than the prompt's "
            f"{asked.num_prompt_tokens}"
        )
    return asked


def _logged_request(fields: Mapping[str, Any]) -> RecordedRequest | None:
    """The request in a `request_ended` line of a gateway's log. None: the request ended without a
    token, or had several sequences, whose lengths are not in the log. ValueError."""
    num_prompt = _count(fields, "num_prompt_tokens", least=0)
    num_generated = _count(fields, "num_generated_tokens", least=0)
    num_cached = _count(fields, "num_cached_tokens", least=0)
    num_sequences = _count(fields, "num_sequences") if "num_sequences" in fields else 1
    if not num_prompt or not num_generated or num_sequences > 1:
        return None
    try:
        ended_s = datetime.fromisoformat(fields["timestamp"]).timestamp()
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"timestamp is {fields.get('timestamp')!r}, not a time") from error
    arrival_s = ended_s - _seconds(fields, "duration_ms") / 1000
    prefix = f"{num_cached} tokens" if num_cached else ""
    return RecordedRequest(
        num_prompt, num_generated, arrival_s, prefix, min(num_cached, num_prompt)
    )


def _count(fields: Mapping[str, Any], name: str, least: int = 1) -> int:
    value = fields.get(name)
    if type(value) is not int or not least <= value <= _MOST_TOKENS:
        raise ValueError(f"{name} is {value!r}, not a number of {least} to {_MOST_TOKENS}")
    return value


def _seconds(fields: Mapping[str, Any], name: str) -> float:
    value = fields.get(name, 0.0)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) < _MOST_SECONDS:
        raise ValueError(f"{name} is {value!r}, not a number")
    return float(value)
