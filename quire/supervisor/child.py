"""One service process of the run: start, forwarded output, restarts, end."""

import asyncio
import math
import os
import re
import signal
import socket
from asyncio.subprocess import DEVNULL, PIPE, STDOUT, Process
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import IntEnum

from quire.sockets import listen
from quire.supervisor.console import Console
from quire.supervisor.errors import ServeError
from quire.supervisor.restart import STEADY_S, Exit, Restarts

PARENT_FD = "QUIRE_PARENT_FD"
_CHUNK_BYTES = 1 << 16
MAX_LINE_BYTES = 1 << 20
RETIRE_S = 3600.0
"""The longest that the requests of a gateway go on after another process has taken its place."""
_LINE_END = re.compile(rb"[\r\n]+")


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


class Listeners:
    """The listening sockets of gateways. They outlive their gateways, so that a connection waits
    while one gateway takes the place of another."""

    def __init__(self) -> None:
        self._sockets: dict[tuple[str, int], socket.socket] = {}

    def get(self, host: str, port: int) -> int:
        """Return the descriptor of the socket that listens there. OSError."""
        if (host, port) not in self._sockets:
            self._sockets[host, port] = listen(host, port)
        return self._sockets[host, port].fileno()

    def close(self) -> None:
        for each in self._sockets.values():
            each.close()


class ParentPipe:
    """A pipe that lets the children notice the death of the supervisor.

    The children hold the reading end. Only the supervisor holds the writing end, so the kernel
    closes it however the supervisor dies.
    """

    def __init__(self) -> None:
        self.reading_end, self._writing_end = os.pipe()

    def close(self) -> None:
        os.close(self.reading_end)
        os.close(self._writing_end)


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
        self._process: Process | None = None
        self._started_at = 0.0
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
        return self._started_at if runs else math.inf

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
        asyncio.get_running_loop().call_later(RETIRE_S, self._send_signal, signal.SIGTERM)

    def restart(self) -> None:
        """Send SIGTERM; `run` then starts the service again."""
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
            while not self._stopping.is_set():
                ended = await self._run_once()
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
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _run_once(self) -> Exit:
        loop = asyncio.get_running_loop()
        self._started_at = loop.time()
        # A process group of its own: Ctrl-C reaches only the supervisor, which then ends the
        # services in order. Not a session of its own: Linux gives each session its own share of a
        # CPU (sched_autogroup), and workers on one CPU would wait hundreds of milliseconds for
        # their turns.
        inherited = {PARENT_FD: self._pipe.reading_end}
        if self.spec.http is not None:
            variable, host, port = self.spec.http
            inherited[variable] = self._listeners.get(host, port)
        self._process = await asyncio.create_subprocess_exec(
            *self.spec.command,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=STDOUT,
            env={
                **os.environ,
                **self._variables(),
                **{name: str(fd) for name, fd in inherited.items()},
            },
            pass_fds=tuple(inherited.values()),
            process_group=0,
        )
        if self._stopping.is_set():
            self._send_signal(signal.SIGTERM)
        last_line = await self._forward(self._process)
        status = await self._process.wait()
        return Exit(status, loop.time() - self._started_at, last_line)

    def _variables(self) -> Mapping[str, str]:
        if self.role == self.spec.role:
            return self.spec.variables
        return {**self.spec.variables, f"QUIRE_{self.spec.role.upper()}_FIRST_ROLE": self.role}

    async def _forward(self, process: Process) -> str:
        """Forward the service's output; returns its last line. A carriage return ends a line too,
        as in progress bars, and so does a length of MAX_LINE_BYTES."""
        assert process.stdout is not None
        rest, last_line = b"", ""
        while chunk := await process.stdout.read(_CHUNK_BYTES):
            *lines, rest = _LINE_END.split(rest + chunk)
            if len(rest) >= MAX_LINE_BYTES:
                lines, rest = [*lines, rest], b""
            for line in lines:
                last_line = self._forward_line(line) or last_line
        return self._forward_line(rest) or last_line

    def _forward_line(self, line: bytes) -> str:
        text = line.decode(errors="replace").rstrip()
        if not text or any(noise in text for noise in self.spec.noise):
            return ""
        self._console.line(self.name, text)
        return text

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
