"""`quire batch`: a batch is computed, and continues where it stopped."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import wait_until

COMMAND = [sys.executable, "-m", "quire.cli", "batch"]
SETTINGS = ["--pool-memory", "16MiB", "--threads", "1"]


def line(custom_id: str, **body: object) -> dict[str, Any]:
    whole = {"prompt": "Paged attention", "temperature": 0, "max_tokens": 8} | body
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": whole}


def write(path: Path, lines: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def answers(path: Path) -> dict[str, dict[str, Any]]:
    read = [json.loads(one) for one in path.read_text().splitlines()]
    assert len({one["custom_id"] for one in read}) == len(read)
    return {one["custom_id"]: one["response"] for one in read}


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments), *SETTINGS]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_a_failed_request_does_not_fail_the_others(tmp_path: Path) -> None:
    """A model has the name that it has in a service. The same command, run again, answers nothing
    and still says that there are errors."""
    named = [line("c", model="other"), line("d", model="SmolLM2-135M-Instruct")]
    source = write(tmp_path / "in", [line("a"), line("b", max_tokens=-1), *named])
    done = run(source, tmp_path / "out")
    assert done.returncode == 1, done.stderr
    responses = answers(tmp_path / "out")
    statuses = {name: one["status_code"] for name, one in responses.items()}
    assert statuses == {"a": 200, "b": 400, "c": 404, "d": 200}
    assert responses["a"]["body"]["choices"][0]["text"]
    assert responses["b"]["body"]["error"]["message"] == "max_tokens is -1, not 1 or more"
    again = run(source, tmp_path / "out")
    told = "0 answered, 0 of them with an error; 4 before, 2 of them with an error"
    assert (again.returncode, again.stdout.strip()) == (1, told)


@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.full)]
)
def test_a_stopped_run_continues_where_it_stopped(tmp_path: Path, number: signal.Signals) -> None:
    """The first requests are short, so that they end long before the last ones."""
    lines = [
        line(f"r{i}", max_tokens=4 + i, min_tokens=4 + i, seed=i, temperature=1) for i in range(30)
    ]
    source, target = write(tmp_path / "in", lines), tmp_path / "out"
    first = subprocess.Popen([*COMMAND, str(source), str(target), *SETTINGS], stderr=-3, stdout=-3)
    wait_until(lambda: target.exists() and target.read_bytes().count(b"\n") >= 5)
    first.send_signal(number)
    ended = first.wait()
    before = target.read_bytes()
    whole = before[: before.rfind(b"\n") + 1]
    target.write_bytes(whole + b'{"id": "batch_req_3')  # the kill may cut a line off
    num_before = whole.count(b"\n")
    if number is signal.SIGKILL:
        assert (ended, num_before < 30) == (-number, True)
    else:  # the requests that run end, which may be all of them
        assert ended == 130 or (ended, num_before) == (0, 30)
    done = run(source, target)
    assert done.returncode == 0, done.stderr
    assert (
        f"{30 - num_before} answered, 0 of them with an error; {num_before} before" in done.stdout
    )
    assert target.read_bytes().startswith(whole)
    assert len(answers(target)) == 30
