"""Workload files, and the errors for other files."""

import json
from pathlib import Path
from typing import Any

import pytest

from advisor.advice import RecordedRequest, read_workload
from quire.errors import QuireError

GOOD = {"num_prompt_tokens": 1, "num_generated_tokens": 1}


def written(tmp_path: Path, *lines: object) -> Path:
    """Writes objects as JSON, and texts unchanged."""
    path = tmp_path / "workload.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def ended(**changes: Any) -> dict[str, Any]:
    """A request's line in a gateway's log."""
    return {
        "timestamp": "2026-03-01T10:00:10.000000Z",
        "level": "info",
        "service": "gateway",
        "event": "request_ended",
        "num_prompt_tokens": 100,
        "num_cached_tokens": 0,
        "num_generated_tokens": 20,
        "duration_ms": 2000.0,
        **changes,
    }


def test_lines_are_requests_in_order_of_arrival(tmp_path: Path) -> None:
    late = {"num_prompt_tokens": 5, "num_generated_tokens": 6, "arrival_s": 2}
    first = {"num_prompt_tokens": 3, "num_generated_tokens": 4, "arrival_s": 0.5}
    shared = {**first, "arrival_s": 1, "prefix": "a", "num_shared_tokens": 2}
    found = read_workload(written(tmp_path, late, "", first, shared))
    assert found.requests == (
        RecordedRequest(3, 4, 0.5),
        RecordedRequest(3, 4, 1.0, "a", 2),
        RecordedRequest(5, 6, 2.0),
    )
    assert not found.is_log


def test_without_times_the_order_is_that_of_the_lines(tmp_path: Path) -> None:
    lines = [{"num_prompt_tokens": n, "num_generated_tokens": 1} for n in (9, 1, 5)]
    found = read_workload(written(tmp_path, *lines))
    assert [asked.num_prompt_tokens for asked in found.requests] == [9, 1, 5]


def test_a_gateways_log_is_a_workload(tmp_path: Path) -> None:
    """Requests arrived at their end minus their duration; other lines of the log are ignored."""
    found = read_workload(
        written(
            tmp_path,
            {"event": "service_starting", "service": "gateway"},
            ended(num_prompt_tokens=7, duration_ms=1000.0),
            "Traceback (most recent call last):",
            ended(num_prompt_tokens=8, duration_ms=9000.0, num_cached_tokens=6),
            ended(num_prompt_tokens=0, num_generated_tokens=0),
            ended(num_sequences=4),
            ended(num_sequences=1, num_prompt_tokens=6, duration_ms=1.0),
            "gateway-1  | " + json.dumps(ended(num_prompt_tokens=9, duration_ms=500.0)),
        )
    )
    assert [asked.num_prompt_tokens for asked in found.requests] == [8, 7, 9, 6]
    assert found.requests[1].arrival_s - found.requests[0].arrival_s == 8.0
    assert (found.requests[0].prefix, found.requests[0].num_shared_tokens) == ("6 tokens", 6)
    assert found.is_log
    assert found.num_skipped == 2


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "line 2: not JSON"),
        ("[" * 100_000, "line 2: not JSON"),
        ("[1]", "line 2: not a JSON object"),
        ({"num_prompt_tokens": 1}, "num_generated_tokens: Field required"),
        (GOOD | {"num_prompt_tokens": "8"}, "Input should be a valid integer"),
        (GOOD | {"num_prompt_tokens": True}, "num_prompt_tokens: Input should be a valid integer"),
        (GOOD | {"num_prompt_tokens": 10**9}, "Input should be less than or equal to 16777216"),
        (GOOD | {"num_prompt_tokens": 0}, "Input should be greater than or equal to 1"),
        (json.dumps(GOOD | {"arrival_s": float("nan")}), "arrival_s: Input should be"),
        (GOOD | {"num_shared_token": 1}, "'num_shared_token' is not a field of a request"),
        (GOOD | {"num_shared_tokens": 1}, "num_shared_tokens without a prefix"),
        (GOOD | {"prefix": "a", "num_shared_tokens": 2}, "is more than the prompt's tokens"),
        (ended(duration_ms="long"), "line 2: duration_ms: Input should be a valid number"),
        (ended(timestamp="yesterday"), "line 2: timestamp: Input should be a valid datetime"),
        (json.dumps(ended())[:-9], "line 2: not JSON"),
    ],
)
def test_a_garbled_line_is_named_with_what_is_wrong(
    tmp_path: Path, line: object, problem: str
) -> None:
    path = written(tmp_path, GOOD, line)
    with pytest.raises(QuireError) as raised:
        read_workload(path)
    assert str(raised.value).startswith(f"{path}, line 2: ")
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "empty"),
        (b"\n \n", "empty"),
        (b"\xff\xfe\x00", "not text"),
        (b'{"event": "service_starting"}\n', "a log in which none of 0 requests counts"),
        (
            json.dumps(ended(num_generated_tokens=0)).encode(),
            "a log in which none of 1 requests counts",
        ),
    ],
)
def test_a_file_without_requests_says_so(tmp_path: Path, content: bytes, problem: str) -> None:
    path = tmp_path / "workload.jsonl"
    path.write_bytes(content)
    with pytest.raises(QuireError, match=problem):
        read_workload(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(QuireError, match=r"nowhere\.jsonl: No such file or directory"):
        read_workload(tmp_path / "nowhere.jsonl")
