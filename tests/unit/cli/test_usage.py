"""`quire usage`: the time that it asks for, and its table."""

import json
import time
from typing import Any

import pytest

from quire.cli import main
from tests.unit.cli.test_cache import Server
from tests.unit.cli.test_cache import server as server

USED: dict[str, Any] = {
    **{"tenant": "acme", "block_seconds": 75.4, "prompt_tokens": 98},
    **{"cached_tokens": 48, "completion_tokens": 400},
}
OTHERS = {**USED, "tenant": "~", "block_seconds": 25.1}


def test_it_shows_the_share_of_each_tenant(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = {"object": "usage", "since": 0, "until": 60, "data": [USED, OTHERS]}
    assert main(["usage", "--since", "2h"]) == 0
    assert abs(int(server.calls[0][1].partition("since=")[2]) - (time.time() - 7200)) < 60
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("since 19")
    assert lines[2].split() == ["acme", "75", "75.0%", "98", "48", "400"]
    assert lines[3].split() == ["~", "25", "25.0%", "98", "48", "400"]

    assert main(["usage", "--since", "2026-11-28T09:00+00:00", "--json"]) == 0
    assert server.calls[1][1].endswith("since=1795856400")
    assert json.loads(capsys.readouterr().out)["data"] == [USED, OTHERS]


def test_no_usage_is_said(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    server.answer = {"object": "usage", "since": 0, "until": 60, "data": []}
    assert main(["usage"]) == 0
    assert capsys.readouterr().out.startswith("no usage since 19")


def test_a_time_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--since", "yesterday"]) == 2
    assert "neither a duration" in capsys.readouterr().err
