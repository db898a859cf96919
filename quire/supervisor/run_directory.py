"""The directories of runs, and the locks that show which runs are alive.

    /dev/shm/quire-<uid>/            locked (flock) while a process adds or removes runs
        <grpc port>-<8 hex>/         locked while the run's supervisor lives
            run.json                 {"pid": ..., "grpc_port": ..., "http_port": ...}
            redis.sock  pools/ ...   files of the services
            metrics/decode-1.sock    where the first gateway reads the metrics of a service

The locks are on the directories themselves, so no lock file is left behind. The kernel drops a lock
however its owner dies: a run directory without a lock belongs to a dead run.
"""

import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from quire.files import try_lock
from quire.sockets import join_host_port, listen
from quire.supervisor.errors import ServeError

RUNS = Path(f"/dev/shm/quire-{os.getuid()}")
_POLL_S = 0.05
_RECORD = "run.json"
_NAME = re.compile(r"\d+-[0-9a-f]{8}")
_MAX_SOCKET_PATH = 107
"""Bytes of a Unix socket's path in Linux, without the final NUL."""


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The content of run.json, which other processes of the user read."""

    pid: int
    host: str
    grpc_port: int
    http_port: int
    num_gateways: int = 1
    drain_s: float = 0.0
    """How long running requests may go on when the run ends."""

    @property
    def ports(self) -> tuple[int, ...]:
        """The gRPC and HTTP ports of all gateways; each gateway has the next ports."""
        return tuple(
            port + index
            for index in range(self.num_gateways)
            for port in (self.grpc_port, self.http_port)
        )

    def shares_port_with(self, other: "RunRecord") -> bool:
        return not set(self.ports).isdisjoint(other.ports)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A locked run directory: it belongs to this process until `remove`, or until the process
    ends."""

    path: Path
    lock: int
    """The descriptor whose closing ends the lock."""

    def remove(self) -> None:
        with _locked(self.path.parent):
            shutil.rmtree(self.path)
            os.close(self.lock)


def claim(runs: Path, record: RunRecord, timeout_s: float = 5.0) -> RunDirectory:
    """Remove the directories of dead runs and make one for this run.

    If an old run or another program still has one of the ports, `claim` waits up to `timeout_s`
    for its end, then raises ServeError.
    """
    give_up_at = time.monotonic() + timeout_s
    while True:
        with _locked(runs):
            _remove_dead_runs(runs)
            conflict = _find_conflict(runs, record)
            if conflict is None:
                return _create(runs, record)
        if time.monotonic() > give_up_at:
            raise ServeError(conflict)
        time.sleep(_POLL_S)


def stop_run(runs: Path, name: str | None, timeout_s: float = 60.0) -> RunRecord:
    """End a run and wait until it has ended. `name` is its gRPC port or its directory, or None for
    the only run in `runs`.

    Raises ServeError unless exactly one run matches, and if the run has not ended
    `timeout_s` after the time that its requests have.
    """
    directory = None if name is None or name.isdecimal() else Path(name).absolute()
    live = list(_live_runs(directory.parent if directory else runs))
    chosen = [
        (path, run) for path, run in live if name in (None, str(run.grpc_port)) or path == directory
    ]
    if len(chosen) != 1:
        which = "one run of this user to end" if name is None else f"a run {name} to end"
        ports = ", ".join(str(run.grpc_port) for _, run in live) or "none"
        raise ServeError(f"there is not {which}: choose with --run PORT; ports of runs: {ports}")
    ((path, run),) = chosen
    os.kill(run.pid, signal.SIGTERM)
    _wait_until_unlocked(path, run.drain_s + timeout_s)
    return run


def free_port(host: str) -> int:
    with listen(host, 0) as listener:
        return int(listener.getsockname()[1])


def _find_conflict(runs: Path, record: RunRecord) -> str | None:
    """Return why the run cannot have its ports, or None if it can."""
    for _, other in _live_runs(runs):
        if record.shares_port_with(other):
            return (
                f"`quire serve` with pid {other.pid} has port {other.grpc_port} or "
                f"{other.http_port}; end it with `quire down --run {other.grpc_port}`, or "
                "choose other ports with --grpc-port and --http-port"
            )
    if record.grpc_port == record.http_port:
        return (
            f"gRPC and HTTP would share port {record.grpc_port}: choose another one with "
            "--grpc-port or --http-port"
        )
    if len(set(record.ports)) < len(record.ports):
        return f"{record.num_gateways} gateways would share ports: {record.ports}; choose others"
    for port in record.ports:
        if not _is_port_free(record.host, port):
            return (
                f"another program listens on {join_host_port(record.host, port)}; choose other "
                "ports with --grpc-port and --http-port"
            )
    return None


def _is_port_free(host: str, port: int) -> bool:
    try:
        listen(host, port).close()
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return False
        address = join_host_port(host, port)
        raise ServeError(f"cannot listen on {address}: {error.strerror}") from error
    return True


def _create(runs: Path, record: RunRecord) -> RunDirectory:
    path = runs / f"{record.grpc_port}-{secrets.token_hex(4)}"
    longest = metrics_directory(path) / "block-manager-1.sock"
    if len(os.fsencode(longest)) > _MAX_SOCKET_PATH:
        raise ServeError(
            f"the path of the run's sockets, such as {longest}, is longer than "
            f"{_MAX_SOCKET_PATH} bytes; choose a shorter --run-root"
        )
    path.mkdir(mode=0o700)
    lock = try_lock(path)
    if lock is None:
        raise ServeError(f"another process has locked the new directory {path}")
    (path / _RECORD).write_text(json.dumps(asdict(record)))
    return RunDirectory(path, lock)


def _remove_dead_runs(runs: Path) -> None:
    for path in run_paths(runs):
        lock = try_lock(path)
        if lock is not None:
            shutil.rmtree(path)
            os.close(lock)


def _live_runs(runs: Path) -> Iterator[tuple[Path, RunRecord]]:
    for path in run_paths(runs):
        lock = try_lock(path)
        if lock is not None:
            os.close(lock)
            continue
        try:
            yield path, RunRecord(**json.loads((path / _RECORD).read_text()))
        except FileNotFoundError:
            continue  # ended since it was listed


def metrics_directory(run: Path) -> Path:
    """The directory of the sockets on which services without a metrics port write their metrics."""
    return run / "metrics"


def supervisor_address(run: Path) -> str:
    """The socket on which the supervisor of a run serves, as an address for gRPC."""
    return f"unix:{run / 'supervisor.sock'}"


def run_paths(runs: Path) -> list[Path]:
    """The directories of all runs, sorted. Other entries of `runs` are not Quire's."""
    if not runs.is_dir():
        return []
    return sorted(path for path in runs.iterdir() if path.is_dir() and _NAME.fullmatch(path.name))


def _wait_until_unlocked(path: Path, timeout_s: float) -> None:
    give_up_at = time.monotonic() + timeout_s
    while (lock := try_lock(path)) is None:
        if not path.exists():
            return
        if time.monotonic() > give_up_at:
            raise ServeError(f"the run in {path} has not ended after {timeout_s:g} s")
        time.sleep(_POLL_S)
    os.close(lock)


@contextmanager
def _locked(runs: Path) -> Iterator[None]:
    """Holds the lock for adding and removing runs; at the end it removes `runs` if it is empty."""
    lock = _lock_current(runs)
    try:
        yield
    finally:
        if not any(runs.iterdir()):
            runs.rmdir()
        os.close(lock)


def _lock_current(runs: Path) -> int:
    """Lock the directory that currently has this path: while the process waits for a lock, another
    process may remove the directory and make a new one."""
    while True:
        if not runs.parent.is_dir():
            raise ServeError(f"cannot make the directory {runs}: there is no {runs.parent}")
        try:
            runs.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ServeError(f"cannot make the directory {runs}: {error.strerror}") from error
        try:
            lock = os.open(runs, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if runs.exists() and os.path.samestat(runs.stat(), os.fstat(lock)):
            _require_private(runs, os.fstat(lock))
            return lock
        os.close(lock)


def _require_private(runs: Path, status: os.stat_result) -> None:
    """Raises ServeError if another user made the directory (any user may write to /dev/shm), or can
    open it."""
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ServeError(
            f"{runs} belongs to another user or is open to others (mode "
            f"{status.st_mode & 0o777:o}); remove it, or choose another --run-root"
        )
