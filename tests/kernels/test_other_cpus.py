"""The kernels on other processors than the building one."""

import platform
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def objects() -> dict[str, Path]:
    """The object files that `make setup` compiled for each instruction set."""
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}"
    system = sysconfig.get_platform().replace("-", "_")
    folder = ROOT / "build" / f"{tag}-{tag}-{system}" / "CMakeFiles" / "_native.dir" / "csrc"
    return {path.name.removesuffix(".cpp.o"): path for path in folder.glob("isa/*.o")}


def merged_symbols(file: Path) -> list[str]:
    """Functions and data of an object file that the linker merges with equal names of other files:
    inline functions and template instances."""
    lines = [line.split(None, 2) for line in run("nm", "--defined-only", "-C", file).splitlines()]
    return [name for _, kind, name in lines if kind in "VWu" and not name.startswith("DW.ref.")]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other CPUs have one instruction set")
def test_code_for_an_instruction_set_is_used_by_no_other_file() -> None:
    """The linker keeps one of several equal inline functions. If it kept one that was compiled for
    AVX-512, an older CPU would run its instructions in code for every CPU."""
    compiled = objects()
    assert {"portable", "avx2", "avx512", "amx"} <= compiled.keys(), "make setup builds them"
    for isa, file in compiled.items():
        strays = [name for name in merged_symbols(file) if f"quire::{isa}::" not in name]
        assert strays == [], isa
