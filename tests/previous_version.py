"""A Python that runs the previous version of Quire, beside the one that runs this version."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from zipfile import ZipFile

import kvops._native

ROOT = Path(__file__).parents[1]
COMMIT = (ROOT / "tests/previous_version.txt").read_text().strip()
"""The last commit that speaks the version before this one (`services/protocol/version.py`)."""
NATIVE = Path(kvops._native.__file__)
NATIVE_SOURCES = ("kernels/CMakeLists.txt", "kernels/csrc")
BUILT = ROOT / "build/previous_version" / COMMIT


def git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, check=False)


def why_not() -> str:
    """Why the previous version cannot be made here; empty if it can."""
    if git("cat-file", "-e", f"{COMMIT}^{{commit}}").returncode == 0:
        return ""
    return f"this clone does not have commit {COMMIT[:8]}, the previous version: it is shallow"


def make_python(directory: Path) -> Path:
    """Make a virtual environment with the previous version and this one's dependencies; returns its
    interpreter. Its compiled kernels are this version's if their sources are the same."""
    source = directory / "source"
    source.mkdir(parents=True)
    archive = git("archive", COMMIT)
    archive.check_returncode()
    subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
    shutil.copy(_native(source), source / "kernels/kvops")
    venv.create(directory / "venv", symlinks=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(directory / "venv")})
    # Of the directories of a path file no path files are read, so this version is not found there.
    paths = source, source / "kernels", sysconfig.get_path("purelib")
    Path(packages, "previous.pth").write_text("\n".join(map(str, paths)))
    return directory / "venv/bin/python"


def _native(source: Path) -> Path:
    if git("diff", "--quiet", COMMIT, "--", *NATIVE_SOURCES).returncode == 0:
        return NATIVE
    if not (BUILT / NATIVE.name).exists():
        wheel = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(BUILT))
        subprocess.run([sys.executable, "-m", "pip", *wheel, str(source)], check=True)
        with ZipFile(next(BUILT.glob("*.whl"))) as built:
            name = next(name for name in built.namelist() if name.endswith(NATIVE.name))
            (BUILT / NATIVE.name).write_bytes(built.read(name))
    return BUILT / NATIVE.name
