"""Triton's kernels, computed by Triton's interpreter on the CPU.

Whether Triton interprets is decided by the environment when its modules are first imported, and
other tests import them too (by way of transformers): so the suite runs in a process of its own.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUITE = Path(__file__).with_name("triton_suite.py")
PARTS = [
    pytest.param("not attends and not slides", id="all but the large matrices"),
    pytest.param("attends", id="attention"),
    pytest.param("slides and bfloat16", id="windows in bf16"),
    pytest.param("slides and float32", id="windows in fp32", marks=pytest.mark.full),
]


@pytest.mark.parametrize("part", PARTS)
def test_triton_s_kernels_agree_with_the_reference(part: str) -> None:
    suite = subprocess.run(
        [sys.executable, "-m", "pytest", "--quiet", "-k", part, str(SUITE)],
        cwd=SUITE.parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "QUIRE_KERNEL_DEVICE": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert suite.returncode == 0, suite.stdout + suite.stderr
