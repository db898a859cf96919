"""`make wheel`: the wheel contains everything that a service needs, in a new environment."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from quire import Client, Sampling
from quire.supervisor.run_directory import free_port

ROOT = Path(__file__).parents[2]


def run(*command: object, cwd: Path = ROOT) -> str:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("QUIRE_", "PYTHON"))}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_wheel_in_a_bare_environment_serves(tmp_path: Path) -> None:
    run("make", "--no-print-directory", "wheel", f"DIST={tmp_path / 'dist'}")
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    assert "manylinux" in wheel.name
    names = zipfile.ZipFile(wheel).namelist()
    assert any(name.startswith("kvops/_native") for name in names)
    assert not any(name.startswith(("tests/", "bench/", "docs/")) for name in names)

    run(sys.executable, "-m", "venv", tmp_path / "venv")
    python = tmp_path / "venv" / "bin" / "python"
    constraints = ROOT / "deploy" / "constraints-cpu.txt"
    wanted = f"{wheel}[worker,local]"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", constraints, wanted)
    hashed = ("--no-deps", "--require-hashes", "-r", ROOT / "deploy" / "demo.txt")
    run(python, "-m", "pip", "install", "--quiet", *hashed)
    port = free_port("127.0.0.1")
    command = [str(tmp_path / "venv" / "bin" / "quire"), "serve", "--grpc-port", str(port)]
    command += ["--http-port", "0", "--pool-memory", "16MiB", "--run-root", str(tmp_path)]
    # From a directory without the sources, so that only the wheel's are found.
    with (tmp_path / "log").open("wb") as log:
        serving = subprocess.Popen(command, cwd=tmp_path, stdout=log, stderr=log)
    try:
        with Client(f"127.0.0.1:{port}") as client:
            while True:
                assert serving.poll() is None, (tmp_path / "log").read_text()[-3000:]
                try:
                    if client.is_ready():
                        break
                except Exception:
                    continue
            answer = client.complete("Paged attention", Sampling(temperature=0, max_tokens=8))
        assert answer.text
    finally:
        serving.terminate()
        serving.wait(30)
