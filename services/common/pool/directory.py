"""A pool's directory: its paths, and how it appears and disappears at once.

Pools are made and removed under `host_lock`, each in a hidden directory: it is renamed when it is
complete, and renamed back before its files are deleted, so that nobody ever sees half a pool.
"""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from services.common.pool.header import PoolHeader
from services.common.pool.locks import is_held

_LOCK_SUFFIX = ".lock"
_HALF = ".half-"


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
    def recovery_lock(self) -> Path:
        """Held by who gets the pool's ledger back. (Not the host's lock: who joins or leaves holds
        that while it waits for the store.)"""
        return self.path / "recovery.lock"

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

    def live_worker_ids(self) -> tuple[str, ...]:
        """Workers whose locks are held; sorted."""
        return tuple(name for name in self.worker_ids() if is_held(self.lock_path(name)))

    def is_live(self) -> bool:
        """Whether at least one worker's lock is held."""
        return bool(self.live_worker_ids())

    def remove(self) -> None:
        """Delete the pool with all its files; one that is gone is no error. Under `host_lock`."""
        half = _half(self.path.parent, self.pool_id)
        with suppress(FileNotFoundError):
            self.path.rename(half.path)
            shutil.rmtree(half.path)


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
    half = _half(root, pool_id)
    half.path.mkdir(mode=0o700)
    try:
        half.workers.mkdir(mode=0o700)
        yield half
        half.path.rename(root / pool_id)
    except BaseException:
        shutil.rmtree(half.path)
        raise


def half_pools(root: Path) -> tuple[Path, ...]:
    """Pools that are just being made or removed; under `host_lock`, those whose maker or remover
    has died."""
    return tuple(path for path in _entries(root) if path.name.startswith(_HALF))


def remove_half_pools(root: Path) -> None:
    """Delete what a process has left that died while it made or removed a pool. Under
    `host_lock`."""
    for path in half_pools(root):
        shutil.rmtree(path)


def _half(root: Path, pool_id: str) -> PoolDirectory:
    return PoolDirectory(root / f"{_HALF}{pool_id}")


def _entries(root: Path) -> list[Path]:
    try:
        return sorted(root.iterdir())
    except FileNotFoundError:
        return []
