"""Triton's kernels in Triton's interpreter on the CPU (`test_gpu_check.py` tests a model of them).

Triton decides whether to interpret by the environment at the first import of its modules, and other
tests import them too, by way of transformers: so interpreted tests run in separate processes.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EVERY_BACKEND = "test_attention.py", "test_ops.py"
"""The files whose tests every backend must pass."""

PARTS = [
    pytest.param(
        "not attends and not slides and (not caps or mixed)", id="all but the large matrices"
    ),
    pytest.param("caps and not mixed", id="caps of scores", marks=pytest.mark.full),
    pytest.param("attends", id="attention"),
    pytest.param("slides and bfloat16", id="windows in bf16", marks=pytest.mark.full),
    pytest.param("slides and float32", id="windows in fp32", marks=pytest.mark.full),
]


@pytest.fixture
def marks(request: pytest.FixtureRequest) -> str:
    """The marks that this run of pytest selects: `make test-full` runs whole matrices."""
    return str(request.config.getoption("markexpr"))


@pytest.mark.timeout(600)  # the whole matrix takes over a minute
def test_the_sampler_on_a_device_draws_as_the_host(marks: str) -> None:
    assert_passes(marks, "triton_sampling_suite.py")


def test_keys_and_values_in_fp8_are_those_of_the_reference(marks: str) -> None:
    assert_passes(marks, "triton_fp8_kv_suite.py")


def test_steps_from_graphs_have_the_tokens_of_transformers(marks: str) -> None:
    assert_passes(marks, "triton_graphs_suite.py")


@pytest.mark.parametrize("part", PARTS)
def test_triton_s_kernels_agree_with_the_reference(marks: str, part: str) -> None:
    assert_passes(marks, *EVERY_BACKEND, "triton_suite.py", selected=part)


def assert_passes(marks: str, *suites: str, selected: str = "") -> None:
    plugin, selection = ("-p", "tests.kernels.triton_interpreter"), ("-m", marks, "-k", selected)
    paths = [str(Path(__file__).with_name(suite)) for suite in suites]
    interpreted = subprocess.run(
        [sys.executable, "-m", "pytest", "--quiet", *plugin, *selection, *paths],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert interpreted.returncode == 0, interpreted.stdout + interpreted.stderr
