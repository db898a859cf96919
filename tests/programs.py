"""Programs of the development environment, run in the repository."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
DOCKERFILE = ROOT / "Dockerfile"
BIN = Path(sys.executable).parent
"""The directory with the programs of this environment."""


def run(*command: str | Path) -> None:
    """Run a program; AssertionError, with its output: it failed."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
