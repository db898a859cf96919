"""The kernels for AMX on a model of its instructions, on any CPU. They configure, load and store
tiles as the manual requires, add products in the documented order, and read nothing outside their
arguments, by AddressSanitizer."""

import subprocess
from pathlib import Path

import pytest

from kvops.native import usable_kernels

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "kernels" / "csrc"
FLAGS = (
    *("-std=c++17", "-Og", "-mavx2", "-mfma", "-mf16c", "-ffp-contract=off", "-fno-math-errno"),
    *("-Wno-psabi", "-g1", "-fsanitize=address", f"-I{SOURCES}", f"-I{HERE}"),
)


@pytest.mark.timeout(300)
@pytest.mark.skipif("avx2" not in usable_kernels(), reason="this CPU has no AVX2")
def test_the_kernels_use_tiles_and_memory_as_they_may(tmp_path: Path) -> None:
    program = tmp_path / "amx_model"
    source = str(HERE / "amx_model.cpp")
    subprocess.run(["c++", *FLAGS, source, "-o", str(program)], check=True)
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
