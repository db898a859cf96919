"""The threads that share a step have no data race, by ThreadSanitizer."""

import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "kernels" / "csrc"


@pytest.fixture(scope="module")
def races(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("thread_pool") / "races"
    build = [
        *("c++", "-std=c++17", "-O2", "-g", "-fsanitize=thread", f"-I{SOURCES}", "-pthread"),
        str(Path(__file__).with_name("thread_pool_races.cpp")),
        *(str(SOURCES / "threads" / name) for name in ("thread_pool.cpp", "signal.cpp")),
        *("-o", str(program)),
    ]
    subprocess.run(build, check=True)
    return program


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("num_lanes", "num_steps"), [(5, 5000), (20, 2000), (64, 200), (128, 60)])
def test_lanes_that_come_and_go_race_with_nobody_and_do_every_piece_once(
    races: Path, num_lanes: int, num_steps: int
) -> None:
    """A group has 8 lanes. Many lanes share the CPUs of this machine, which may be two."""
    run = subprocess.run(
        [races, str(num_lanes), str(num_steps)], capture_output=True, text=True, check=False
    )
    if "unexpected memory mapping" in run.stderr:
        pytest.skip("this ThreadSanitizer cannot run with the kernel's address randomization")
    assert "WARNING: ThreadSanitizer" not in run.stderr, run.stderr
    assert run.returncode == 0
