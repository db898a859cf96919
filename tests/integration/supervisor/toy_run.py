"""`quire serve` as a process, with a real Valkey and toy services."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from quire.supervisor.run_directory import free_port
from quire.v1.supervisor_pb2 import ScaleRequest, ScaleResponse
from quire.v1.supervisor_pb2_grpc import SupervisorStub
from tests.waiting import wait_until

TOYS = Path(__file__).parent / "toys"
LIMIT_S = 20.0


class Run:
    """A `quire serve` with toy services, and its own root for run directories."""

    def __init__(
        self,
        root: Path,
        *,
        grpc_port: int | None = None,
        flags: Sequence[str] = (),
        model: Path = TOYS,
        **toys: str,
    ) -> None:
        self.root = root
        self.grpc_port = grpc_port or free_port("127.0.0.1")
        self.output = root.parent / f"output-{self.grpc_port}-{time.monotonic_ns()}"
        environment = {**os.environ, "PYTHONPATH": str(TOYS), "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {f"TOY_{role.upper()}": behaviour for role, behaviour in toys.items()}
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "quire.cli", "serve", "--model", str(model)),
                    *("--run-root", str(root), "--grpc-port", str(self.grpc_port)),
                    *("--http-port", "0", *flags),
                ],
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    @property
    def directory(self) -> Path:
        (path,) = self.root.glob(f"{self.grpc_port}-*")
        return path

    def text(self) -> str:
        return self.output.read_text()

    def pids(self, role: str) -> list[int]:
        """Pids of running members of a role; `redis` is found by its socket."""
        if role == "redis":
            return [pid for pid in _pids() if str(self.directory / "redis.sock") in _command(pid)]
        entered = self.directory.glob(f"members/{role}-*")
        pids = [int(path.name.rsplit("-", 1)[1]) for path in entered]
        return [pid for pid in pids if is_alive(pid)]

    def everyone(self) -> list[int]:
        roles = ("redis", "block_manager", "prefill", "decode", "gateway")
        return [pid for role in roles for pid in self.pids(role)]

    def wait_until_serving(self) -> None:
        wait_until(lambda: "Quire is serving" in self.text(), explain=self.text)

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=LIMIT_S)


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdecimal()]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    return _command(pid) != ""


def scale(run: Run, **numbers: Any) -> ScaleResponse:
    with grpc.insecure_channel(f"unix:{run.directory}/supervisor.sock") as channel:
        return SupervisorStub(channel).Scale(ScaleRequest(**numbers), timeout=LIMIT_S)
