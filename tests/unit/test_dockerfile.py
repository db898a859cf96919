"""The Dockerfile: its stages, the files that it copies, and what it builds from them."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.programs import BIN, DOCKERFILE, ROOT, run


def test_the_dockerfile_has_no_faults() -> None:
    run(BIN / "hadolint", "Dockerfile")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """Only the files that the Dockerfile copies and .dockerignore lets through."""
    let_through = re.findall(r"^!(.+)$", (ROOT / ".dockerignore").read_text(), re.MULTILINE)
    directory = tmp_path / "sources"
    for path in _copied():
        assert any(path == kept or path.startswith(kept + "/") for kept in let_through), path
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_dir():
            shutil.copytree(ROOT / path, directory / path)
        else:
            shutil.copy(ROOT / path, directory / path)
    return directory


def test_the_control_image_has_a_complete_wheel_and_needs_no_compiler(sources: Path) -> None:
    wheel = _wheel(sources, QUIRE_NATIVE="OFF", CXX="/nonexistent")
    names = zipfile.ZipFile(wheel).namelist()
    for needed in (
        "quire/cli/__main__.py",
        "quire/v1/inference_pb2.py",
        "kvops/__init__.py",
        "services/gateway/__main__.py",
    ):
        assert needed in names
    functions = {path.name for path in (ROOT / "blockstore" / "functions").glob("*.lua")}
    assert {Path(name).name for name in names if name.endswith(".lua")} == functions
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not any(name.endswith(".so") for name in names)


_ELF_MACHINES = {"x86_64": 62, "aarch64": 183}


@pytest.mark.full
@pytest.mark.parametrize(
    ("platform", "flags"),
    [
        ("amd64", ""),  # GCC 12 warns of its own headers of AVX-512
        ("arm64", "-Werror"),
    ],
)
def test_the_native_kernels_are_built_without_python_sources(
    platform: str, flags: str, tmp_path: Path
) -> None:
    """From the files that their stage copies, built as there for each platform, with flags for no
    particular machine. Those for arm64 use no instruction or function of x86-64 only."""
    variables = dict(re.findall(r"\b([A-Z]+)=(\S+)", _stages()[f"compiler-{platform}"][1]))
    machine = variables["MACHINE"]
    if not shutil.which(f"{machine}-linux-gnu-g++"):
        pytest.skip(f"apt-get install {variables['COMPILER']}")
    stage = _stages()["kernels"][1]
    for path, target in re.findall(r"^COPY kernels/(\S+) (\S+)$", stage, re.MULTILINE):
        source, place = ROOT / "kernels" / path, tmp_path / target
        shutil.copytree(source, place) if source.is_dir() else shutil.copy(source, place)
    built, installed = tmp_path / "built", tmp_path / "installed"
    nanobind = subprocess.check_output([sys.executable, "-m", "nanobind", "--cmake_dir"], text=True)
    of_stage = re.findall(r"-D(?:CMAKE|SKBUILD)_\S+", stage)
    choices = [choice.replace('"', "").replace("$MACHINE", machine) for choice in of_stage]
    choices += [f"-DPython_EXECUTABLE={sys.executable}", f"-Dnanobind_ROOT={nanobind.strip()}"]
    checks = ("-DCMAKE_EXPORT_COMPILE_COMMANDS=ON", f"-DCMAKE_CXX_FLAGS={flags}")
    run(BIN / "cmake", "-S", tmp_path, "-B", built, *choices, *checks)
    run(BIN / "cmake", "--build", built, "--parallel", "2")
    run(BIN / "cmake", "--install", built, "--prefix", installed)
    module = installed / f"kvops/_native.cpython-311-{machine}-linux-gnu.so"
    assert int.from_bytes(module.read_bytes()[18:20], "little") == _ELF_MACHINES[machine]
    assert "-march=native" not in (built / "compile_commands.json").read_text()


def _wheel(sources: Path, **environment: str) -> Path:
    build = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    wheels = sources.parent / "wheels"
    done = subprocess.run(
        [*build, "--wheel-dir", wheels, sources],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = wheels.glob("*.whl")
    return wheel


def _copied() -> list[str]:
    """The files of the build context that the Dockerfile copies."""
    stage = DOCKERFILE.read_text().partition("AS sources")[2].partition("FROM")[0]
    lines = re.findall(r"^COPY (.+) \S+$", stage, re.MULTILINE)
    return [path for line in lines for path in line.split()]


def test_the_lists_of_requirements_are_those_of_the_project() -> None:
    def listed(what: str) -> list[str]:
        script = str(ROOT / "deploy" / "requirements.py")
        out: str = subprocess.check_output([sys.executable, script, what], text=True)
        return out.splitlines()

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert listed("build") == project["build-system"]["requires"]
    assert listed("project") == project["project"]["dependencies"]
    extras = project["project"]["optional-dependencies"]
    assert listed("worker") == extras["worker"]
    assert listed("mover") == extras["mover"]
    assert listed("cuda") == [*extras["worker"], *extras["nvml"], *extras["cuda"][1:]]


def _stages() -> dict[str, tuple[str, str]]:
    """The stages of the Dockerfile for amd64 by name, each with its base and its lines."""
    pattern = r"^FROM ([^\n]+) AS (\S+)\n(.*?)(?=^FROM|\Z)"
    found = re.findall(pattern, DOCKERFILE.read_text(), re.MULTILINE | re.DOTALL)
    return {name: (base.replace("$TARGETARCH", "amd64"), body) for base, name, body in found}
