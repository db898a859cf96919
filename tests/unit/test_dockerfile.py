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
