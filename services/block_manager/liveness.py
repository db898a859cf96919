"""Answers one question for every kind of pool: may this worker still write its blocks?

    pool in a file      lock dropped: the kernel has unmapped the process's memory before
    mover               lock dropped ─▶ the process has exited
    pool on a GPU       lock dropped ─▶ the process has exited ─▶ the driver lists it no more
                                     └▶ or it lives on, and says that the GPU has done its work
    ... of several ranks        the same of every rank's process, on its own GPU
    other host          nobody there writes here; the store knows when the lease has ended

A GPU may still run what a killed process launched, after the process has lost its lock: the driver
takes a process off its list when it has torn the process's context down. A network adapter may
still write what a killed mover has asked for: it stops when the kernel has closed the mover's
connections, the last thing that it does before the process counts as exited.

See ADR 121 and ADR 162.
"""

import json
import os
import select
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from quire.files import replace_file
from services.block_manager.gpu.processes import GpuProcesses, ProcessListError
from services.pool.directory import PoolDirectory
from services.pool.keeper import close_all


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """The process of a rank of a worker on GPUs, or of a mover. The records are in the pool's
    directory, so that the next block manager knows them, too."""

    pid: int
    started: int
    """The start in the kernel's ticks since boot, because a pid may be used again."""
    gpu_uuid: str
    """Empty for a mover."""
    is_listed: bool = True
    """Whether the driver listed the process when it registered. If not, the list shows no end."""

    @classmethod
    def read(cls, path: Path) -> "tuple[ProcessRecord, ...]":
        """Raises OSError, ValueError or TypeError if there is no readable record."""
        records = tuple(cls(**fields) for fields in json.loads(path.read_text()))
        if not records:
            raise ValueError(f"{path} is empty")
        return records


def write_records(path: Path, records: Sequence[ProcessRecord]) -> None:
    replace_file(path, json.dumps([asdict(record) for record in records]).encode())


class WorkerProcesses:
    """The pidfds of the workers on GPU pools, and of movers."""

    def __init__(self) -> None:
        self._pidfds: dict[Path, dict[int, int]] = {}

    def add(
        self,
        directory: PoolDirectory,
        worker_id: str,
        pidfds: Sequence[int],
        gpu_uuids: Sequence[str],
        listed: GpuProcesses,
    ) -> Sequence[ProcessRecord]:
        """Record a worker, with a process and a GPU for each rank; the caller keeps `pidfds`.
        Raises ValueError if one is missing, or is no pidfd of a process that can be seen from here,
        OSError if the pool is gone, and ProcessListError, because a list that cannot be read now
        could not be read at the worker's death either."""
        pids = [_pid_of(pidfd) for pidfd in pidfds]
        path = directory.process_path(worker_id)
        records = [
            ProcessRecord(pid, _start_of(pid), uuid, not uuid or pid in listed.pids(uuid))
            for pid, uuid in zip(pids, gpu_uuids, strict=True)
        ]
        write_records(path, records)
        close_all(self._pidfds.pop(path, {}).values())
        known = self._pidfds[path] = {}
        for pid, pidfd in zip(pids, pidfds, strict=True):
            if pid not in known:  # a mover is one process on several GPUs
                known[pid] = os.dup(pidfd)
        return records

    def has_exited(self, path: Path, record: ProcessRecord) -> bool:
        known = self._pidfds.setdefault(path, {})
        if record.pid not in known:
            try:
                pidfd = os.pidfd_open(record.pid)
                started = _start_of(record.pid)
            except (OSError, ValueError):
                return True
            if started != record.started:  # another process has its pid by now
                os.close(pidfd)
                return True
            known[record.pid] = pidfd
        return bool(select.select([known[record.pid]], [], [], 0)[0])

    def forget(self, path: Path) -> None:
        """Close the pidfds and delete the records of a worker that was reaped or has left."""
        close_all(self._pidfds.pop(path, {}).values())
        path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close all pidfds; the records stay."""
        while self._pidfds:
            close_all(self._pidfds.popitem()[1].values())


class Liveness:
    """Answers for all members of this host: workers on pools in files and on GPUs, and movers."""

    def __init__(self, processes: WorkerProcesses, listed: GpuProcesses) -> None:
        self._processes = processes
        self._listed = listed

    def obstacle(self, directory: PoolDirectory, worker_id: str) -> str | None:
        """Return why a worker whose lock has dropped may still write, or None if it never will."""
        if not directory.path.exists() or directory.finished_path(worker_id).exists():
            return None
        path = directory.process_path(worker_id)
        if directory.is_file_pool and not path.exists():
            return None
        try:
            records = ProcessRecord.read(path)
        except (OSError, ValueError, TypeError) as error:
            return f"no record of its process: {error}"
        is_lost = directory.gone.exists()
        return next(filter(None, (self._obstacle(path, one, is_lost) for one in records)), None)

    def _obstacle(self, path: Path, record: ProcessRecord, is_lost: bool) -> str | None:
        if not self._processes.has_exited(path, record):
            return f"process {record.pid} has not exited"
        if not record.gpu_uuid or is_lost:
            return None  # a lost GPU lists nothing, and its pool's blocks are given to nobody
        if not record.is_listed:
            return f"the driver has never listed process {record.pid} on {record.gpu_uuid}"
        try:
            if record.pid in self._listed.pids(record.gpu_uuid):
                return f"the driver still lists process {record.pid} on {record.gpu_uuid}"
        except ProcessListError as error:
            return str(error)
        return None

    def forget(self, directory: PoolDirectory, worker_id: str) -> None:
        """Drop what is known of a worker that was reaped."""
        self._processes.forget(directory.process_path(worker_id))
        directory.finished_path(worker_id).unlink(missing_ok=True)


def _pid_of(pidfd: int) -> int:
    for line in Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines():
        name, _, value = line.partition(":")
        if name == "Pid" and int(value) > 0:
            return int(value)
    raise ValueError(
        "the block manager does not see the worker's process: containers need one PID namespace"
    )


def _start_of(pid: int) -> int:
    """Return the start of a process, in ticks. Raises ValueError if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as error:
        raise ValueError(f"no process {pid}: {error}") from error
    return int(fields[19])
