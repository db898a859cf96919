"""The threads that share out a step, without a data race by ThreadSanitizer's account."""

import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "kernels" / "csrc"


@pytest.mark.timeout(180)
def test_lanes_that_come_and_go_race_with_nobody_and_do_every_piece_once(tmp_path: Path) -> None:
    program = tmp_path / "races"
    build = [
        *("c++", "-std=c++17", "-O2", "-g", "-fsanitize=thread", f"-I{SOURCES}", "-pthread"),
        *(str(Path(__file__).with_name("thread_pool_races.cpp")), str(SOURCES / "thread_pool.cpp")),
        *("-o", str(program)),
    ]
    subprocess.run(build, check=True)
    run = subprocess.run([program], capture_output=True, text=True)
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("this ThreadSanitizer cannot run with the kernel's address randomization")
    assert "WARNING: ThreadSanitizer" not in run.stderr, run.stderr
    assert run.returncode == 0
