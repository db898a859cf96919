"""Lets the installed version of the supervisor take the place of the one that runs.

The process stays and runs another program (exec). So services stay its children, and the pipe by
which they notice its death stays open, as do the lock of the run's directory and the gateways'
listening sockets. The new program gets the same command line, with a message in a descriptor.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import NoReturn

from pydantic import TypeAdapter, ValidationError

from quire.supervisor.child import ChildState
from quire.supervisor.errors import ServeError

_FLAG = "--handover"
_TRIAL_S = 60.0
"""The longest that a trial may take; it imports what a supervisor imports."""


@dataclass(frozen=True, slots=True)
class Handover:
    """The state of a supervisor, for the next one. Descriptors are the same numbers there."""

    run: Path
    """The run's directory."""
    lock: int
    """The descriptor that holds the directory's lock."""
    pipe: tuple[int, int]
    """The ends of the pipe by which services notice the supervisor's death."""
    listeners: tuple[tuple[str, int, int], ...]
    """The host, the port and the descriptor of each listening socket."""
    children: tuple[ChildState, ...]
    grpc_port: int
    http_port: int
    has_served: bool
    """Whether the run has ever been ready."""
    signals: int | None
    """The descriptor to read the signals from that came during the handover; None in a trial, in
    which the new version only has to show that it could go on."""

    @property
    def descriptors(self) -> tuple[int, ...]:
        sockets = (descriptor for _, _, descriptor in self.listeners)
        outputs = (each.process.output for each in self.children if each.process is not None)
        signals = () if self.signals is None else (self.signals,)
        return self.lock, *self.pipe, *sockets, *outputs, *signals


def receive(message: int) -> Handover:
    """Read the message. Services inherit none of its descriptors. Raises ServeError."""
    try:
        with os.fdopen(message, "rb") as file:
            file.seek(0)
            received = TypeAdapter(Handover).validate_json(file.read())
        for each in () if received.signals is None else received.descriptors:
            os.set_inheritable(each, False)
    except (ValidationError, OSError) as error:
        raise ServeError(f"the message of the supervisor before cannot be read: {error}") from error
    return received


def try_out(state: Handover) -> None:
    """Let the installed version show that it starts with this command line, and reads the state.
    Raises ServeError if it does not. Blocks the thread."""
    message = _written(replace(state, signals=None))
    try:
        done = subprocess.run(
            _command(message),
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=PIPE,
            text=True,
            check=False,
            pass_fds=(message,),
            timeout=_TRIAL_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ServeError(f"the installed version does not start: {error}") from error
    finally:
        os.close(message)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
        raise ServeError(f"the installed version does not start: {reason.removeprefix('quire: ')}")


@contextmanager
def signals_kept(numbers: Iterable[signal.Signals]) -> Iterator[int]:
    """Keep these signals for the next supervisor, which has to unblock them. Yields a descriptor
    from which it reads those that have interrupted another thread of this process."""
    kept, written_end = os.pipe()
    os.set_blocking(written_end, False)
    of_loop = signal.set_wakeup_fd(written_end)
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield kept
    finally:
        signal.set_wakeup_fd(of_loop)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
        os.close(kept)
        os.close(written_end)


def execute(state: Handover) -> NoReturn:
    """Become the installed version. Raises OSError."""
    message = _written(state)
    for each in (message, *state.descriptors):
        os.set_inheritable(each, True)
    os.execv(sys.executable, _command(message))


def _written(state: Handover) -> int:
    """A descriptor of a file in memory that has the state as JSON."""
    message = os.memfd_create("handover")
    os.write(message, TypeAdapter(Handover).dump_json(state))
    return message


def _command(message: int) -> list[str]:
    """Return this process's command line for the new version, which refuses the line if it is too
    old to know the flag. Raises ServeError."""
    arguments = [each for each in sys.orig_argv[1:] if not each.startswith(f"{_FLAG}=")]
    if "serve" not in arguments:
        raise ServeError("this supervisor was not started by the command `quire serve`")
    place = arguments.index("serve") + 1
    return [sys.executable, *arguments[:place], f"{_FLAG}={message}", *arguments[place:]]
