"""`quire serve` as a user runs it, in separate processes."""

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quire.client import Client
from quire.connections import Tls
from quire.errors import QuireError
from quire.sockets import living_sockets
from quire.supervisor.run_directory import free_port
from tests.waiting import wait_until

START_LIMIT_S = 90.0


@dataclass
class Deployment:
    """A running `quire serve`. `address`: the addresses of its gateways, separated by commas.
    `tls`: how clients reach them."""

    process: "subprocess.Popen[bytes]"
    address: str
    http: str
    run_root: Path
    log: Path
    tls: Tls | None = None

    @property
    def operations(self) -> str:
        """The sockets of its gateways for operations, separated by commas."""
        (run,) = self.run_root.glob(f"{self.address.split(',')[0].rpartition(':')[2]}-*")
        return ",".join(f"unix:{path}" for path in living_sockets(run))

    def children(self, module: str = "") -> list[int]:
        """Pids of its processes whose command line matches `module`, such as --role=decode or
        valkey."""
        listing = subprocess.run(
            ["ps", "-ww", "-eo", "pid=,ppid=,args="], capture_output=True, text=True, check=True
        ).stdout
        rows = [line.split(None, 2) for line in listing.splitlines()]
        parents = {int(pid): int(parent) for pid, parent, _ in rows}

        def is_mine(pid: int) -> bool:
            parent = parents.get(pid)  # it may have a larger number, once numbers begin anew
            return parent is not None and (parent == self.process.pid or is_mine(parent))

        return sorted(
            int(pid) for pid, _, args in rows if re.search(module, args) and is_mine(int(pid))
        )

    def running(self, module: str) -> list[int]:
        """Pids of a service that must be running. AssertionError, with the log and all processes:
        it is not."""
        pids = self.children(module)
        if not pids:
            lines = self.log.read_text().splitlines()
            seen = [line[:400] for line in lines if "request_ended" not in line][-60:]
            listing = subprocess.run(["ps", "-wwejf"], capture_output=True, text=True, check=True)
            raise AssertionError("\n".join([f"no {module}:", *seen, listing.stdout]))
        return pids

    def gateway(self, address: str) -> int:
        """The pid of the gateway that listens on `address`."""
        entry = f"QUIRE_GATEWAY_PORT={address.rpartition(':')[2]}".encode()
        pids = self.running("services.gateway")
        (pid,) = (p for p in pids if entry in Path(f"/proc/{p}/environ").read_bytes().split(b"\0"))
        return pid

    def wait_until_ready(self, limit_s: float = START_LIMIT_S) -> None:
        """Wait until all workers have served, and each gateway accepts requests. A gateway alone is
        ready with the first worker of each kind."""

        def has_started() -> bool:
            assert self.process.poll() is None, f"it has ended:\n{self.log_tail()}"
            return "Quire is serving" in self.log.read_text()

        def is_ready(client: Client) -> bool:
            with suppress(QuireError):
                return has_started() and client.is_ready()
            return False

        wait_until(has_started, limit_s=limit_s, explain=self.log_tail)
        for address in self.address.split(","):
            with Client(address, tls=self.tls) as client:
                wait_until(partial(is_ready, client), limit_s=limit_s, explain=self.log_tail)

    def log_tail(self) -> str:
        return self.log.read_text()[-6000:]

    def stop(self, limit_s: float = 40.0) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(limit_s)


def start(
    models: Path | str | Sequence[str],
    tmp_path: Path,
    *args: str,
    num_gateways: int = 1,
    tls: Tls | None = None,
) -> Deployment:
    """Start a deployment and return at once; `wait_until_ready` waits."""
    grpc_port, http_port = _free_ports(num_gateways), _free_ports(num_gateways)
    args = (*args, "--gateways", str(num_gateways))
    # Pools belong on a tmpfs; the directory is the test's own.
    run_root = Path("/dev/shm") / f"quire-test-{os.getpid()}-{tmp_path.name}"
    log = tmp_path / "serve.log"
    command = [sys.executable, "-m", "quire.cli", "serve", "--threads", "1"]
    command += [str(models)] if isinstance(models, Path | str) else models
    command += ["--grpc-port", str(grpc_port), "--http-port", str(http_port)]
    command += ["--run-root", str(run_root), "--report-cached-tokens", *args]
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    addresses = ",".join(f"127.0.0.1:{grpc_port + index}" for index in range(num_gateways))
    http = f"{'https' if tls else 'http'}://127.0.0.1:{http_port}"
    return Deployment(process, addresses, http, run_root, log, tls)


def _free_ports(number: int) -> int:
    """The first of `number` consecutive free ports."""
    while True:
        first = free_port("127.0.0.1")
        with ExitStack() as stack, suppress(OSError):
            for port in range(first, first + number):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


@contextmanager
def serving(
    models: Path | str | Sequence[str],
    tmp_path: Path,
    *args: str,
    num_gateways: int = 1,
    tls: Tls | None = None,
) -> Iterator[Deployment]:
    deployment = start(models, tmp_path, *args, num_gateways=num_gateways, tls=tls)
    try:
        deployment.wait_until_ready()
        yield deployment
        assert deployment.process.poll() is None, deployment.log_tail()
    finally:
        if deployment.process.poll() is None:
            deployment.stop()
        remove(deployment.run_root)


def remove(run_root: Path) -> None:
    subprocess.run(["rm", "-rf", str(run_root)], check=True)
