"""A pool's directory: its paths, how it appears at once, and how it is removed.

Pools are made and removed under `host_lock`. Everything is built in a hidden directory first and
renamed, so that nobody ever sees half a pool.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from services.common.pool.header import PoolHeader
from services.common.pool.locks import is_held

_LOCK_SUFFIX = ".lock"
_UNFINISHED = ".new-"


@dataclass(frozen=True, slots=True)
class PoolDirectory:
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

    @property
    def stamps(self) -> Path:
        return self.path / "stamps"

    @property
    def workers(self) -> Path:
        return self.path / "workers"

    def read_header(self) -> PoolHeader:
        """BadHeader; FileNotFoundError when the pool is gone."""
        return PoolHeader.read(self.header)

    def lock_path(self, worker_id: str) -> Path:
        return self.workers / f"{worker_id}{_LOCK_SUFFIX}"

    def worker_ids(self) -> tuple[str, ...]:
        """Workers with a lock file, alive or not yet reaped; sorted."""
        try:
            names = [path.name for path in self.workers.iterdir()]
        except FileNotFoundError:
            return ()
        return tuple(
            sorted(
                name.removesuffix(_LOCK_SUFFIX)
                for name in names
                if name.endswith(_LOCK_SUFFIX) and not name.startswith(".")
            )
        )

    def is_live(self) -> bool:
        """Whether at least one worker's lock is held."""
        return any(is_held(self.lock_path(worker_id)) for worker_id in self.worker_ids())

    def remove(self) -> None:
        """Delete the pool with all its files; one that is gone is no error. Under `host_lock`."""
        if self.path.exists():
            shutil.rmtree(self.path)


def pool_directories(root: Path) -> tuple[PoolDirectory, ...]:
    """All pools under `root`, sorted by id; whatever else lies there is left alone."""
    return tuple(
        PoolDirectory(path)
        for path in _entries(root)
        if not path.name.startswith(".") and (path / "workers").is_dir()
    )


@contextmanager
def new_directory(root: Path, pool_id: str) -> Iterator[PoolDirectory]:
    """A hidden directory to build the pool in, which gets its name when the block succeeds and is
    removed when it fails. Under `host_lock`."""
    unfinished = PoolDirectory(root / f"{_UNFINISHED}{pool_id}")
    unfinished.path.mkdir(mode=0o700)
    try:
        unfinished.workers.mkdir(mode=0o700)
        yield unfinished
        unfinished.path.rename(root / pool_id)
    except BaseException:
        unfinished.remove()
        raise


def remove_unfinished(root: Path) -> None:
    """Delete what a process that died while it made a pool has left. Under `host_lock`."""
    for path in _entries(root):
        if path.name.startswith(_UNFINISHED):
            PoolDirectory(path).remove()


def _entries(root: Path) -> list[Path]:
    try:
        return sorted(root.iterdir())
    except FileNotFoundError:
        return []
