"""`quire advise block-size` with real processes, kernels and a store."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def advise(*args: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "quire.cli", "advise", "block-size"]
    return subprocess.run(
        [*command, "--weights-cache", "none", *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    path = tmp_path / "workload.jsonl"
    line = json.dumps({"num_prompt_tokens": 40, "num_generated_tokens": 12})
    path.write_text(f"{line}\n" * 30)
    return path


def test_a_workload_gets_an_answer(workload: Path) -> None:
    done = advise("--workload", str(workload), "--requests", "20", "--json")
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert [size["block_size"] for size in found["sizes"]] == [8, 16, 32, 64, 128, 256]
    assert found["num_requests"] == 20
    assert "the last 20 of 30 requests" in found["notes"]
    for size in found["sizes"]:
        shares = size["utilization"] + size["tail"] + size["look_ahead"]
        assert shares == pytest.approx(1.0)
        assert size["attention_us"] > 0
        assert size["store_us_per_token"] > 0
        assert 0 < size["left"] < 1
    left = {size["block_size"]: size["left"] for size in found["sizes"]}
    assert left[found["block_size"]] >= 0.95 * max(left.values())
    assert left[256] < left[found["block_size"]]  # 52 tokens in a block of 256


@pytest.mark.parametrize(
    ("args", "problem"),
    [(["--pool-memory", "64KiB"], "a request of 52 tokens never fits a pool of 0 blocks of 8")],
)
def test_an_impossible_question_is_answered_in_one_line(
    workload: Path, args: list[str], problem: str
) -> None:
    done = advise("--workload", str(workload), *args)
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("quire: ")
    assert problem in line
