"""A pool's directory: its paths, and how it appears and disappears atomically.

A process that makes or removes a pool holds `host_lock`. It builds the pool in a hidden directory
and renames that when it is complete; before it deletes the files, it renames the directory back. So
no process ever sees an incomplete pool.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from services.pool.header import PoolHeader
from services.pool.locks import is_held

_LOCK_SUFFIX = ".lock"
_INCOMPLETE = ".half-"


@dataclass(frozen=True, slots=True)
class PoolDirectory:
    """The paths of one pool, and the state of its workers' locks."""

    path: Path

    @property
    def pool_id(self) -> str:
        return self.path.name

    @property
    def header(self) -> Path:
        return self.path / "header.json"

    @property
    def kv(self) -> Path:
        return self.path / "kv"

    def arena(self, rank: int) -> Path:
        """The arena of one rank of every worker; `kv` is the arena of rank 0."""
        return self.path / f"kv.{rank}" if rank else self.kv

    @property
    def arenas(self) -> tuple[Path, ...]:
        """The arenas of all ranks that exist."""
        return tuple(sorted(self.path.glob("kv*")))

    @property
    def is_file_pool(self) -> bool:
        """Whether the arena is the file `kv`, and not in the memory of a GPU."""
        return self.kv.exists()

    @property
    def gone(self) -> Path:
        """A file that exists once the content of the arena is lost, with its GPU."""
        return self.path / "gone"

    @property
    def stamps(self) -> Path:
        return self.path / "stamps"

    @property
    def recovery_lock(self) -> Path:
        """The lock of the process that recovers the pool's ledger. It is not the host's lock, which
        a worker holds while it joins or leaves and waits for the store."""
        return self.path / "recovery.lock"

    @property
    def workers(self) -> Path:
        return self.path / "workers"

    def read_header(self) -> PoolHeader:
        """Read header.json. Raises BadHeader, or FileNotFoundError if the pool is gone."""
        return PoolHeader.read(self.header)

    def lock_path(self, worker_id: str) -> Path:
        return self.workers / f"{worker_id}{_LOCK_SUFFIX}"

    def process_path(self, worker_id: str) -> Path:
        """The record of a worker's process, which the block manager keeps for pools on GPUs."""
        return self.workers / f"{worker_id}.process"

    def finished_path(self, worker_id: str) -> Path:
        """A file by which a worker on a GPU that drops its lock, while its process goes on, says
        that the GPU has done all that it launched."""
        return self.workers / f"{worker_id}.finished"

    def worker_ids(self) -> tuple[str, ...]:
        """The workers with a lock file, sorted: they live, or are not yet reaped."""
        names = [path.name for path in _entries(self.workers)]
        return tuple(
            name.removesuffix(_LOCK_SUFFIX)
            for name in names
            if name.endswith(_LOCK_SUFFIX) and not name.startswith(".")
        )

    def live_worker_ids(self) -> tuple[str, ...]:
        """The workers whose locks are held, sorted."""
        return tuple(name for name in self.worker_ids() if is_held(self.lock_path(name)))

    def is_live(self) -> bool:
        """Whether a worker of the pool lives."""
        return bool(self.live_worker_ids())

    def remove(self) -> None:
        """Delete the pool and all its files; no error if it is gone. The caller holds
        `host_lock`."""
        incomplete = _incomplete(self.path.parent, self.pool_id)
        with suppress(FileNotFoundError):
            self.path.rename(incomplete.path)
            shutil.rmtree(incomplete.path)


def pool_directories(root: Path) -> tuple[PoolDirectory, ...]:
    """All pools under `root`, sorted by id; other files and directories are ignored."""
    return tuple(
        PoolDirectory(path)
        for path in _entries(root)
        if not path.name.startswith(".") and (path / "workers").is_dir()
    )


@contextmanager
def new_directory(root: Path, pool_id: str) -> Iterator[PoolDirectory]:
    """A hidden directory in which the caller builds a pool. If the `with` block succeeds, the
    directory gets the pool's name; if it fails, it is removed. The caller holds `host_lock`."""
    incomplete = _incomplete(root, pool_id)
    incomplete.path.mkdir(mode=0o700)
    try:
        incomplete.workers.mkdir(mode=0o700)
        yield incomplete
        incomplete.path.rename(root / pool_id)
    except BaseException:
        shutil.rmtree(incomplete.path)
        raise


def incomplete_pools(root: Path) -> tuple[Path, ...]:
    """Hidden directories of pools that a process is making or removing. If the caller holds
    `host_lock`, that process has died."""
    return tuple(path for path in _entries(root) if path.name.startswith(_INCOMPLETE))


def remove_incomplete_pools(root: Path) -> None:
    """Delete the incomplete pools of processes that have died. The caller holds `host_lock`."""
    for path in incomplete_pools(root):
        shutil.rmtree(path)


def _incomplete(root: Path, pool_id: str) -> PoolDirectory:
    return PoolDirectory(root / f"{_INCOMPLETE}{pool_id}")


def _entries(root: Path) -> list[Path]:
    try:
        return sorted(root.iterdir())
    except FileNotFoundError:
        return []
