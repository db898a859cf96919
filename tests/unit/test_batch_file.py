"""The files of a batch: their errors are reported before anything is computed."""

from __future__ import annotations

import json
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from services.offline.batch import (
    BatchError,
    BatchRequest,
    earlier_answers,
    read_requests,
    run_batch,
)

GOOD: dict[str, Any] = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": "x"},
}


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([GOOD, GOOD], "line 2: custom_id 'a' is there twice"),
        ([GOOD | {"custom_id": 3}], "line 1: custom_id: Input should be a valid string"),
        ([GOOD | {"url": "/v1/models"}], "line 1: url: Input should be '/v1/chat/completions' or"),
        ([GOOD | {"method": "GET"}], "line 1: method: Input should be 'POST'"),
        ([GOOD | {"body": {"stream": True}}], "line 1: body: stream is set"),
        ([GOOD | {"body": []}], "line 1: body: Input should be a valid dictionary"),
        ([[1]], "line 1: Input should be a valid dictionary"),
        ([], "has no requests"),
    ],
)
def test_input_line_that_is_no_request_is_named(
    tmp_path: Path, lines: list[object], problem: str
) -> None:
    with pytest.raises(BatchError, match=problem):
        read_requests(write(tmp_path / "in", *lines))


def test_input_that_is_no_json_or_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "in").write_text("\n{\n")
    with pytest.raises(BatchError, match="line 2: Expecting property name"):
        read_requests(tmp_path / "in")
    with pytest.raises(BatchError, match="No such file"):
        read_requests(tmp_path / "absent")


def test_output_without_its_last_newline_loses_that_line(tmp_path: Path) -> None:
    requests = read_requests(write(tmp_path / "in", GOOD, GOOD | {"custom_id": "b"}))
    line = '{"custom_id": "a", "response": {"status_code": 200}}\n'
    (tmp_path / "out").write_text(line + '{"id": "batch_req_1')
    assert earlier_answers(tmp_path / "out", requests) == {"a": False}
    assert (tmp_path / "out").read_text() == line


def test_answers_of_an_earlier_run_that_are_errors_are_known(tmp_path: Path) -> None:
    """So that the same command, run again, does not end as if all had succeeded."""
    requests = read_requests(write(tmp_path / "in", GOOD, GOOD | {"custom_id": "b"}))
    earlier = [
        {"custom_id": name, "response": {"status_code": status}}
        for name, status in (("a", 404), ("b", 200))
    ]
    assert earlier_answers(write(tmp_path / "out", *earlier), requests) == {"a": True, "b": False}


def test_output_of_another_batch_is_refused(tmp_path: Path) -> None:
    requests = read_requests(write(tmp_path / "in", GOOD))
    with pytest.raises(BatchError, match="line 1: an answer to 'z'"):
        earlier_answers(write(tmp_path / "out", {"custom_id": "z", "response": {}}), requests)


@pytest.mark.parametrize(
    "content", [json.dumps(GOOD), json.dumps(GOOD) + "\n", "notes", "[]\n", "a\nb"]
)
def test_output_that_is_another_file_is_refused_and_kept(content: str, tmp_path: Path) -> None:
    requests = read_requests(write(tmp_path / "in", GOOD))
    (tmp_path / "out").write_text(content)
    with pytest.raises(BatchError, match="out"):
        earlier_answers(tmp_path / "out", requests)
    assert (tmp_path / "out").read_text() == content


async def test_answer_that_cannot_be_written_is_named() -> None:
    async def answer(request: BatchRequest) -> tuple[int, Any]:
        return 200, {}

    request = BatchRequest(custom_id="a", url="/v1/completions", body={})
    with (
        FileIO("/dev/full", "w") as full,
        pytest.raises(BatchError, match="/dev/full: No space left on device"),
    ):
        await run_batch(answer, [request], full, 2, lambda: None)
