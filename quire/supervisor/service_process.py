"""A process of a service, and the pipe with its output. The supervisor may replace itself meanwhile
(`quire.supervisor.handover`): the process stays its child, and the pipe stays open."""

import asyncio
import os
import re
import signal
import subprocess
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

MAX_LINE_BYTES = 1 << 20
_CHUNK_BYTES = 1 << 16
_LINE_END = re.compile(r"[\r\n]+")


@dataclass(slots=True)
class ServiceProcess:
    """A process that this supervisor, or the one before it, has started."""

    pid: int
    output: int
    """The descriptor from which to read what the process writes."""
    started_at: float
    """When the process started, by the event loop's clock, which is the system's."""
    unfinished: str = ""
    """The output after the last whole line, a character for each byte (Latin-1)."""
    last_line: str = ""
    """The last line that was forwarded."""
    returncode: int | None = None
    """The exit status, or the negative number of the signal; None while the process runs."""

    @classmethod
    def start(
        cls, command: Sequence[str], environment: Mapping[str, str], inherited: Sequence[int]
    ) -> Self:
        """Start a process that inherits these descriptors. Raises OSError."""
        output, written_end = os.pipe()
        try:
            # A process group of its own: Ctrl-C reaches only the supervisor, which then ends the
            # services in order. Not a session of its own: Linux gives each session its own share of
            # a CPU (sched_autogroup), and workers on one CPU would wait hundreds of milliseconds
            # for their turns.
            started = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=written_end,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=inherited,
                process_group=0,
            )
        except BaseException:
            os.close(output)
            raise
        finally:
            os.close(written_end)
        started.returncode = 0  # `Popen` has nothing to wait for: `ended` does
        return cls(started.pid, output, asyncio.get_running_loop().time())

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    async def ended(self) -> int:
        """Wait until the process has ended. Returns its exit status, or the negative number of the
        signal."""
        pidfd = os.pidfd_open(self.pid)
        try:
            await _until_readable(pidfd)
        finally:
            os.close(pidfd)
        _, status = os.waitpid(self.pid, 0)  # noqa: ASYNC222  # it has ended
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    async def lines(self) -> AsyncIterator[str]:
        """Yield the lines of the output until its end. A carriage return ends a line too, as in
        progress bars, and so does a length of MAX_LINE_BYTES."""
        try:
            while chunk := await self._read():
                *lines, rest = _LINE_END.split(self.unfinished + chunk)
                if len(rest) >= MAX_LINE_BYTES:
                    lines, rest = [*lines, rest], ""
                self.unfinished = rest
                for line in filter(None, map(_text, lines)):
                    yield line
            if line := _text(self.unfinished):
                yield line
        finally:
            os.close(self.output)

    async def _read(self) -> str:
        await _until_readable(self.output)
        return os.read(self.output, _CHUNK_BYTES).decode("latin-1")


def _text(line: str) -> str:
    return line.encode("latin-1").decode(errors="replace").rstrip()


async def _until_readable(descriptor: int) -> None:
    """Wait until there is something to read, or the other end is closed."""
    readable = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, readable.set)
    try:
        await readable.wait()
    finally:
        loop.remove_reader(descriptor)
