"""deploy/install.sh: the sources of PyTorch, with a pip that only records its arguments."""

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "install.sh"
INDEX = "https://download.pytorch.org/whl/cpu"
PIP = """#!/bin/sh
echo "$*" >>"$PIP_NOTES"
case "$*" in
  *--index-url*) exit $STATUS_OF_PUBLIC_INDEX ;;
  *--no-deps*) exit $STATUS_OF_OWN_INDEXES ;;
esac
"""
CPU_TORCH = "install --quiet --no-deps --requirement deploy/constraints-cpu.txt"
FROM_PYTORCH = f"{CPU_TORCH} --index-url {INDEX} --timeout 5 --retries 1"
WITH_CPU_TORCH = "install --quiet --constraint deploy/constraints-cpu.txt .[worker]"


@pytest.mark.parametrize(
    ("own", "public", "commands"),
    [
        (0, 1, [CPU_TORCH, WITH_CPU_TORCH]),
        (1, 0, [CPU_TORCH, FROM_PYTORCH, WITH_CPU_TORCH]),
        (1, 1, [CPU_TORCH, FROM_PYTORCH, "install --quiet .[worker]"]),
    ],
)
def test_the_cpu_build_comes_from_pips_indexes_else_from_pytorchs_else_not_at_all(
    own: int, public: int, commands: list[str], tmp_path: Path
) -> None:
    pip, notes = tmp_path / "pip", tmp_path / "notes"
    pip.write_text(PIP)
    pip.chmod(0o755)
    variables = {
        "PIP": str(pip),
        "PIP_NOTES": str(notes),
        "STATUS_OF_OWN_INDEXES": str(own),
        "STATUS_OF_PUBLIC_INDEX": str(public),
    }
    done = subprocess.run(
        [SCRIPT, ".[worker]"],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    )
    assert notes.read_text().splitlines() == commands
    assert ("its default build is" in done.stdout) == (own == public == 1)
