"""A Python that runs the previous version of Quire, beside the one that runs this version."""

import subprocess
import sysconfig
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
COMMIT = (ROOT / "tests/previous_version.txt").read_text().strip()
"""The last commit that speaks the version before this one (`services/protocol/version.py`)."""

NAMES = "def __getattr__(name):\n    return type(name, (), {})\n"


def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)


def why_not() -> str:
    """Why the previous version cannot be made here; empty if it can."""
    if git("cat-file", "-e", f"{COMMIT}^{{commit}}").returncode == 0:
        return ""
    return f"this clone does not have commit {COMMIT[:8]}, the previous version: it is shallow"


def make_python(directory: Path) -> Path:
    """Make a virtual environment with the previous version and this one's dependencies; returns its
    interpreter. In the place of its compiled kernels, whose compilation takes minutes, is a module
    that has only their names: workers compute with BACKEND=reference."""
    source = directory / "source"
    source.mkdir(parents=True)
    archive = git("archive", COMMIT)
    archive.check_returncode()
    subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
    (source / "kernels/kvops/_native.py").write_text(NAMES)
    venv.create(directory / "venv", symlinks=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(directory / "venv")})
    # Of the directories of a path file no path files are read, so this version is not found there.
    paths = source, source / "kernels", sysconfig.get_path("purelib")
    Path(packages, "previous.pth").write_text("\n".join(map(str, paths)))
    return directory / "venv/bin/python"
