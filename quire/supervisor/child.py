"""One service process of the run: start, forwarded output, restarts, end."""

import asyncio
import math
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum

from quire.supervisor.console import Console
from quire.supervisor.descriptors import Listeners, ParentPipe
from quire.supervisor.errors import ServeError
from quire.supervisor.restart import STEADY_S, Exit, Restarts
from quire.supervisor.service_process import ServiceProcess

PARENT_FD = "QUIRE_PARENT_FD"
RETIRE_S = 3600.0
"""The longest that the requests of a gateway go on after another process has taken its place."""


class Stage(IntEnum):
    """The order in which services end: from the last stage to the first, so that each service ends
    before the services on which it depends."""

    STORE = 0
    BLOCK_MANAGER = 1
    WORKER = 2
    GATEWAY = 3


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """How to start one service."""

    name: str
    command: tuple[str, ...]
    stage: Stage
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the service gets in addition to the supervisor's own."""
    noise: tuple[str, ...] = ()
    """An output line that contains one of these strings is not forwarded."""
    base_ports: Mapping[str, int] = field(default_factory=dict)
    """The ports that the user has set for a whole role, by variable name."""
    http: tuple[str, str, int] | None = None
    """A variable, and the host and the port of a listening socket, whose descriptor is its value;
    the supervisor keeps the socket open as long as it runs."""
    metrics_socket: tuple[str, str] | None = None
    """A variable, and the beginning of the path that is its value; the service's number follows."""
    number: int = 0
    """Different for each running service of a role; added to the role's base ports."""
    role: str = ""
    """The role of a worker, as `model` is its model; empty for other services."""
    model: str = ""

    def worker(self, index: int, number: int) -> "ChildSpec":
        """Return the spec of one worker of this role and model, with `index` in its name."""
        setting = f"QUIRE_{self.role.upper()}_WORKER_NUMBER"
        environment = {**self.environment, setting: str(index)}
        name = f"{self.role}-{index}"
        return replace(self, name=name, number=number, environment=environment)

    @property
    def variables(self) -> dict[str, str]:
        """The variables that the service gets in addition to the supervisor's own."""
        ports = {name: str(base + self.number) for name, base in self.base_ports.items()}
        sockets = {}
        if self.metrics_socket is not None:
            name, path = self.metrics_socket
            sockets[name] = f"{path}-{self.number + 1}.sock"
        return {**self.environment, **ports, **sockets}


@dataclass(frozen=True, slots=True)
class ChildState:
    """A service as one supervisor hands it to the next one."""

    spec: ChildSpec
    role: str
    """The role of a worker, which may have changed."""
    is_stopping: bool
    """Whether the service is told to end, or has ended."""
    process: ServiceProcess | None
    """The process, or None if none runs."""


class Child:
    """Keeps one service process running, and ends it.

    `is_steady` says whether the run has ever been ready. From then on no failure is final, because
    what the service lacks (a Redis on another host, memory) may come back.
    """

    def __init__(
        self,
        spec: ChildSpec,
        pipe: ParentPipe,
        listeners: Listeners,
        console: Console,
        is_steady: Callable[[], bool],
    ) -> None:
        self.spec = spec
        self.role = spec.role
        """The role of a worker, which it has again when it starts again."""
        self._pipe = pipe
        self._listeners = listeners
        self._console = console
        self._is_steady = is_steady
        self._restarts = Restarts()
        self._stopping = asyncio.Event()
        self._process: ServiceProcess | None = None
        self._failure = ""
        self._ended = asyncio.Event()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def is_staying(self) -> bool:
        """Whether the service runs, or will run again."""
        return not self._stopping.is_set() and not self._ended.is_set()

    @property
    def has_ended(self) -> bool:
        """Whether the service has ended and will not start again."""
        return self._ended.is_set()

    @property
    def running_since(self) -> float:
        """When the process started, by the event loop's clock; infinite if none runs."""
        runs = self._process is not None and self._process.returncode is None
        return self._process.started_at if runs and self._process else math.inf

    @property
    def pid(self) -> int | None:
        """The id of the process, or None if none runs."""
        return self._process.pid if self.running_since < math.inf and self._process else None

    @property
    def failure(self) -> str:
        """Why the service fails to start again and again; empty once it has run for STEADY_S, or if
        it is told to end."""
        is_steady = asyncio.get_running_loop().time() - self.running_since >= STEADY_S
        return "" if not self.is_staying or is_steady else self._failure

    @property
    def state(self) -> ChildState:
        process = self._process if self.pid is not None else None
        return ChildState(self.spec, self.role, not self.is_staying, process)

    def adopt(self, state: ChildState) -> None:
        """Go on where the supervisor before this one was; `run` comes next."""
        self.role, self._process = state.role, state.process
        if state.is_stopping:
            self._stopping.set()
            self._end_later()

    def drain(self) -> None:
        """Send SIGTERM, without a restart afterwards; `run` returns when the process has ended.

        A worker first lets its requests move or finish, for as long as its own settings allow.
        """
        self._console.note(f"{self.name} leaves")
        self._stopping.set()
        self._send_signal(signal.SIGTERM)

    def retire(self) -> None:
        """Let another process take this gateway's place: it keeps the requests that it has, takes
        no other ones, and ends with the last of them, or after `RETIRE_S`."""
        self._console.note(f"{self.name} leaves its ports to a new process")
        self._stopping.set()
        self._send_signal(signal.SIGUSR1)
        self._end_later()

    def restart(self, spec: ChildSpec) -> None:
        """Send SIGTERM; `run` then starts the service again, by this spec."""
        self.spec = spec
        self._send_signal(signal.SIGTERM)

    async def ended(self) -> None:
        """Wait until the service has ended and will not start again."""
        await self._ended.wait()

    async def run(self) -> None:
        """Keep the service running until `stop`, `kill` or `drain`.

        A service that ends by itself starts again, even a worker that was drained: only `drain`
        makes the run smaller. ServeError: the service cannot start.
        """
        try:
            while self._process is not None or not self._stopping.is_set():
                process = self._process = self._process or self._start()
                ended = await self._until_ended(process)
                self._process = None
                if self._stopping.is_set():
                    break
                await self._pause_after(ended)
        finally:
            self._ended.set()

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace_s`; returns when `run` has ended."""
        self._stopping.set()
        self._send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await self._ended.wait()
        except TimeoutError:
            self._console.note(f"{self.name} did not end in {grace_s:g} s: killed")
            self.kill()
            await self._ended.wait()

    def kill(self) -> None:
        self._stopping.set()
        self._send_signal(signal.SIGKILL)

    def _send_signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)

    def _end_later(self) -> None:
        asyncio.get_running_loop().call_later(RETIRE_S, self._send_signal, signal.SIGTERM)

    def _start(self) -> ServiceProcess:
        inherited = {PARENT_FD: self._pipe.reading_end}
        if self.spec.http is not None:
            variable, host, port = self.spec.http
            inherited[variable] = self._listeners.get(host, port)
        descriptors = {name: str(fd) for name, fd in inherited.items()}
        environment = {**os.environ, **self._variables(), **descriptors}
        return ServiceProcess.start(self.spec.command, environment, tuple(inherited.values()))

    def _variables(self) -> Mapping[str, str]:
        if self.role == self.spec.role:
            return self.spec.variables
        return {**self.spec.variables, f"QUIRE_{self.spec.role.upper()}_FIRST_ROLE": self.role}

    async def _until_ended(self, process: ServiceProcess) -> Exit:
        status, _ = await asyncio.gather(process.ended(), self._forward(process))
        lived_s = asyncio.get_running_loop().time() - process.started_at
        return Exit(status, lived_s, process.last_line)

    async def _forward(self, process: ServiceProcess) -> None:
        """Forward the service's output without its noise."""
        async for line in process.lines():
            if not any(noise in line for noise in self.spec.noise):
                self._console.line(self.name, line)
                process.last_line = line

    async def _pause_after(self, ended: Exit) -> None:
        delay_s = self._restarts.delay_after(ended)
        hopeless = bool(ended.status) and self._restarts.hopeless
        self._failure = (ended.last_line or str(ended)) if hopeless else ""
        if self._failure and not self._is_steady():
            raise ServeError(f"{self.name} cannot start: {self._failure}")
        self._console.note(f"{self.name} ended ({ended}); it starts again")
        with suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._stopping.wait()
