"""`make setup` before it installs anything: which Python makes .venv, and what it leaves in
.venv."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PYTHON_3_9 = f"""#!{sys.executable}
# Says that it is Python 3.9, and makes environments all the same.
import runpy, sys
sys.version_info = (3, 9, 2, "final", 0)
if sys.argv[1] == "--version":
    print("Python 3.9.2")
elif sys.argv[1] == "-c":
    exec(sys.argv[2])
else:
    del sys.argv[:2]
    runpy.run_module("venv", run_name="__main__")
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The part of the repository that the first step of `make setup` needs; nothing is
    installed."""
    (tmp_path / "deploy").mkdir()
    for name in ("Makefile", "pyproject.toml", "deploy/venv.sh", "deploy/constraints-cpu.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("demo.txt", "test-models.txt"):  # of these, nothing is installed
        (tmp_path / "deploy" / name).touch()
    write_program(tmp_path / "deploy" / "install.sh", "#!/bin/sh\n")
    return tmp_path


def write_program(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o755)


def make(clone: Path, python: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    return subprocess.run(
        ["make", ".venv/.installed", f"PYTHON={python}"],
        cwd=clone,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def version_of(clone: Path) -> str:
    command = [str(clone / ".venv/bin/python"), "-c", "import sys; print(sys.version_info[:2])"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_python_that_is_too_old_makes_no_environment(clone: Path) -> None:
    write_program(clone / "python3.9", PYTHON_3_9)
    done = make(clone, "./python3.9")
    assert done.returncode != 0
    assert (
        "Quire needs Python 3.11 or later; ./python3.9 is Python 3.9.2.\n"
        "Name another one: make setup PYTHON=python3.11\n"
    ) in done.stderr
    assert not (clone / ".venv").exists()


def test_a_python_that_is_not_there_is_named(clone: Path) -> None:
    done = make(clone, "python3.99")
    assert "Quire needs Python 3.11 or later; python3.99 is not there.\n" in done.stderr
    assert not (clone / ".venv").exists()


def test_an_environment_of_an_old_python_is_made_anew(clone: Path) -> None:
    """An earlier `make setup` may have left it."""
    (clone / ".venv" / "bin").mkdir(parents=True)
    write_program(clone / ".venv" / "bin" / "python", PYTHON_3_9)
    write_program(clone / ".venv" / "bin" / "pip", "#!/bin/sh\nexit 1\n")
    done = make(clone, sys.executable)
    assert done.returncode == 0, done.stderr
    assert version_of(clone) == str(sys.version_info[:2])


def test_the_package_of_an_older_clone_is_removed(clone: Path) -> None:
    """The package was installed as `quire`, by a hook that finds its packages before the present
    ones."""
    subprocess.run([sys.executable, "-m", "venv", clone / ".venv"], check=True)
    (site,) = (clone / ".venv" / "lib").glob("python3*/site-packages")
    (site / "_quire_editable.pth").write_text("import sys\n")
    info = site / "quire-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quire\nVersion: 0.1.0\n")
    (info / "INSTALLER").write_text("pip\n")
    (info / "RECORD").write_text(
        "_quire_editable.pth,,\n"
        + "".join(f"{info.name}/{name},,\n" for name in ("METADATA", "INSTALLER", "RECORD"))
    )
    marker = clone / ".venv" / "marker"
    marker.touch()
    done = make(clone, sys.executable)
    assert done.returncode == 0, done.stderr
    assert not info.exists()
    assert not (site / "_quire_editable.pth").exists()
    assert marker.exists()  # the environment itself was kept
    assert "WARNING" not in make(clone, sys.executable).stderr


def test_the_python_asked_for_is_the_packages() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == ">=3.11"
    assert "sys.version_info < (3, 11)" in (ROOT / "deploy" / "venv.sh").read_text()


def test_messages_recommend_our_own_distribution() -> None:
    """`quire` on PyPI is another program."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    wrong = re.compile(r"pip install '?quire(?!-serve)\b|\bquire\[\w+\]")
    files = [
        ROOT / name for name in listed.stdout.split() if name.endswith((".py", ".md", ".toml"))
    ]
    found = [path for path in files if path.is_file() and wrong.search(path.read_text())]
    assert found == []
