"""The kernels for AMX on a model of its instructions, on any CPU: they configure, load and store
tiles as the manual requires, and give the bits of the emulation."""

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
SIDES = {
    # The macro that -mamx-bf16 would define; the model takes the place of the instructions.
    "modelled": ("-DQUIRE_ISA=modelled", "-D__AMX_BF16__", "-include", "amx_model.h"),
    "emulated": ("-DQUIRE_ISA=emulated", "-DQUIRE_EMULATES_AMX"),
}


@pytest.mark.timeout(300)
@pytest.mark.skipif("avx2" not in usable_kernels(), reason="this CPU has no AVX2")
def test_the_kernels_and_the_emulation_give_the_same_bits(tmp_path: Path) -> None:
    """They also read nothing outside their arguments, by AddressSanitizer."""
    program, objects = tmp_path / "amx_model", []
    for side, flags in SIDES.items():
        objects.append(str(tmp_path / f"{side}.o"))
        compiled = ("-c", str(HERE / "amx_side.cpp"), "-o", objects[-1])
        subprocess.run(["c++", *FLAGS, *flags, *compiled], check=True)
    main = str(HERE / "amx_model.cpp")
    subprocess.run(["c++", *FLAGS, main, *objects, "-o", str(program)], check=True)
    run = subprocess.run([program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
