"""bench/gpu_check.sh works before it meets a GPU."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from bench.gpu import __main__ as program
from bench.gpu import attention, operations
from bench.gpu.check import Failed, Machine
from kvops.ops import Backend
from kvops.reference import ReferenceKernels
from kvops.step import AttentionCall

ROOT = Path(__file__).parents[2]
ON_A_BARE_MACHINE = ("torch", "triton", "numpy")
QUICK = ("environment", "operations", "arena", "peers")
"""The groups that `make test` runs."""

BLOCK_IMPORTS = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {names!r} or name == "kvops._native":
            raise ModuleNotFoundError(f"no module named {{name!r}} on a bare machine", name=name)

sys.meta_path.insert(0, Blocked())
"""


def missing_on_a_bare_machine() -> set[str]:
    """All installed modules except those of PyTorch, Triton, NumPy and their requirements."""
    needed, found = set[str](), list(ON_A_BARE_MACHINE)
    while found:
        package = re.sub(r"[-_.]+", "-", found.pop()).lower()
        if package not in needed:
            needed.add(package)
            try:
                lines = importlib.metadata.requires(package) or []
            except importlib.metadata.PackageNotFoundError:
                continue  # for another platform
            found += [re.split(r"[^\w.-]", line)[0] for line in lines if "extra ==" not in line]
    own = {"kvops", "services", "quire", "blockstore", "advisor"}
    return {
        module
        for module, packages in importlib.metadata.packages_distributions().items()
        if not needed & {re.sub(r"[-_.]+", "-", package).lower() for package in packages}
    } - own


def test_candidates_for_tiles_of_experts_are_measured() -> None:
    """It prints a row of the table, or says that the defaults are best."""
    ran = subprocess.run(
        [sys.executable, "-m", "bench.gpu.expert_tiles", "--dry-run"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    row = r"Row\(gpu='', shape=Shape\(num_experts=4, hidden=64, width=40, form='float16'\).*"
    pattern = rf"    # tiny\n    (# the defaults are best: 2 rows|{row})"
    assert re.match(pattern, ran.stdout), ran.stdout


@pytest.mark.parametrize(
    "group", [pytest.param(g, marks=[] if g in QUICK else pytest.mark.full) for g in program.GROUPS]
)
def test_checks_pass_tiny_with_nothing_but_pytorch_and_triton(tmp_path: Path, group: str) -> None:
    """The checks run in Triton's interpreter, without any other package and without the compiled
    C++ kernels. Each group imports the modules of all."""
    missing = missing_on_a_bare_machine()
    assert {"structlog", "pydantic", "redis", "pytest", "safetensors", "xxhash"} <= missing
    (tmp_path / "sitecustomize.py").write_text(BLOCK_IMPORTS.format(names=missing))
    path = f"{tmp_path}:kernels:."
    ran = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--dry-run", "--group", group],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    results = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    assert results
    assert {result["status"] for result in results} <= {"ok", "skipped"}
    reasons = {result["detail"] for result in results if result["status"] == "skipped"}
    assert all(
        "needs the package" in r or "CUDA device" in r or re.search(r"\b(yet|only)\b", r)
        for r in reasons
    )


def test_the_documentation_has_every_group() -> None:
    page = (ROOT / "docs/operations/gpu.md").read_text()
    table = page[page.index("### What `bench/gpu_check.sh` checks") :].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == list(program.GROUPS)


def test_the_check_without_a_gpu_says_so_and_runs_nothing(tmp_path: Path) -> None:
    ran = subprocess.run(
        ["bench/gpu_check.sh", "--json", tmp_path / "out.json"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 2
    assert "'triton' needs a CUDA device" in ran.stdout
    assert len(json.loads((tmp_path / "out.json").read_text())["results"]) == 1


def test_a_run_that_is_stopped_writes_what_it_has(tmp_path: Path) -> None:
    """The caller may have a limit of time. Nothing of it goes on, not even a group's own
    processes."""
    report = tmp_path / "gpu_check.json"
    with subprocess.Popen(
        ["bench/gpu_check.sh", "--dry-run"],
        cwd=ROOT,
        env={**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        assert run.stdout is not None
        first = run.stdout.readline()
        written = json.loads(report.read_text())
        assert written["results"]
        assert written["exit_status"] is None
        children = Path(f"/proc/{run.pid}/task/{run.pid}/children").read_text().split()
        run.terminate()
        rest = run.stdout.read()
        assert run.wait() == 1, rest
    results = json.loads(report.read_text())["results"]
    assert first.startswith("ok")
    assert results[0]["group"] == "environment"
    assert results[-1]["detail"] == "stopped by SIGTERM"
    assert not any(Path(f"/proc/{child}").exists() for child in children)


class BrokenKernels(ReferenceKernels):
    """Kernels that compute the last row of a batch wrongly."""

    def paged_attention(self, call: AttentionCall) -> Tensor:
        out = super().paged_attention(call)
        if len(call.context_lens) > 1:
            out[-1] *= 1.02
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        out = super().rms_norm(x, weight, eps)
        return out * (1 + 0.02 * (len(x) > 1))


BROKEN, GEOMETRY = Machine(True), attention.TINY_GEOMETRIES[0]
BROKEN.ops = Backend(BrokenKernels())
RMS_NORM = operations.OPERATIONS["rms_norm"]
FOUND: dict[str, Callable[[], object]] = {
    r"error is [\d.]+ times": lambda: attention.equals_reference(BROKEN, GEOMETRY),
    "row 1 of 1 tokens alone: .* values have": lambda: attention.invariance(BROKEN, GEOMETRY),
    r"error is .*[\d.]+ times": lambda: operations.equals_reference(BROKEN, RMS_NORM),
    "token 0 alone": lambda: operations.invariance(BROKEN, RMS_NORM),
}


@pytest.mark.parametrize(("message", "check"), FOUND.items(), ids=FOUND.keys())
def test_a_wrong_kernel_fails_its_check(message: str, check: Callable[[], object]) -> None:
    with pytest.raises(Failed, match=message):
        check()
