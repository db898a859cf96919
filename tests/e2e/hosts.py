"""The hosts of one deployment. Each has its own pool root, block manager, workers and mover; all
share one Valkey, one secret and one gateway."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from quire.module_command import service_command
from tests.waiting import wait_until

LIMIT_S = 60.0
SECRET = "a secret of this test, long enough"


@dataclass
class Host:
    """`ip`: where its services listen and are reached. `within`: a command before each of its
    processes, such as `ip netns exec NAME`. `settings`: variables of all its processes. `python`:
    the interpreter that runs them."""

    name: str
    folder: Path
    model: Path
    redis_url: str
    pool_memory: int
    ip: str = "127.0.0.1"
    within: Sequence[str] = ()
    settings: dict[str, str] = field(default_factory=dict)
    python: Path = Path(sys.executable)
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def run_dir(self) -> Path:
        """The host's run directory, on a tmpfs as every pool."""
        return Path("/dev/shm") / f"quire-test-{os.getpid()}-{self.folder.name}-{self.name}"

    @property
    def pool_root(self) -> Path:
        return self.run_dir / "pools"

    def log(self, name: str) -> Path:
        return self.folder / f"{self.name}-{name}.log"

    def start(self, service: str, name: str = "", **settings: str) -> None:
        """Start `python -m services.<service>` as process `name` of this host."""
        name = name or service
        worker = {"MODEL": str(self.model), "THREADS": "1", "POOL_MEMORY": str(self.pool_memory)}
        common = {
            "REDIS_URL": self.redis_url,
            "RUN_DIR": str(self.run_dir),
            "SECRET": SECRET,
            "HOST": self.ip,
            "LOG_FORMAT": "json",
            "STOP_GRACE_S": "10",
        }
        if service in ("prefill", "decode"):
            common |= worker
        prefix = f"QUIRE_{service.upper()}_"
        environment = {**os.environ, **{prefix + k: v for k, v in (common | settings).items()}}
        with self.log(name).open("ab") as output:
            self.processes[name] = subprocess.Popen(
                [*self.within, str(self.python), *service_command(service)[1:]],
                env=environment | self.settings,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def wait_for(self, name: str, event: str, number: int = 1) -> dict[str, Any]:
        """Wait until the log of a process has the event `number` times; returns its last line with
        it."""
        found = wait_until(
            partial(self.events, name, event),
            lambda events: len(events) >= number,
            explain=lambda: f"no {event} of {self.name} {name}\n{self.tail(name)}",
        )
        return found[-1]

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        lines = self.log(name).read_text().splitlines()
        entries = (json.loads(line) for line in lines if line.startswith("{"))
        return [entry for entry in entries if entry["event"] == event]

    def tail(self, name: str) -> str:
        return self.log(name).read_text()[-6000:]

    def stop(self) -> None:
        """End all processes: gateways and movers first, the block manager last."""
        order = sorted(self.processes, key=lambda name: (name == "block_manager", name))
        for name in order:
            process = self.processes.pop(name)
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(15)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        shutil.rmtree(self.run_dir, ignore_errors=True)
