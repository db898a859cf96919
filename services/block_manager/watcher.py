"""Notices the death of workers: for each worker a thread blocks in flock on the worker's lock file,
until the kernel drops the lock."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

from services.common.pool.directory import PoolDirectory, pool_directories
from services.common.pool.locks import wait_until_dropped
from services.common.runtime.logging import get_logger
from services.common.runtime.ticks import until_tick

log = get_logger(__name__)

Reap = Callable[[PoolDirectory, str], Awaitable[None]]


class Watcher:
    """Calls `reap(directory, worker_id)` for each dead worker, while holding the worker's lock, and
    then unlinks the lock file."""

    def __init__(self, root: Path, reap: Reap) -> None:
        self._root = root
        self._reap = reap
        self._watched: set[Path] = set()

    async def run(self, pause_s: Callable[[], float]) -> NoReturn:
        """Watch all workers of the host. Find new pools and workers by scanning the directories,
        with a pause of `pause_s()` after each scan."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                for directory in pool_directories(self._root):
                    for worker_id in directory.worker_ids():
                        path = directory.lock_path(worker_id)
                        if path not in self._watched:
                            self._watched.add(path)
                            tasks.create_task(self._watch(directory, worker_id))
                await asyncio.sleep(until_tick(pause_s()))

    async def _watch(self, directory: PoolDirectory, worker_id: str) -> None:
        path = directory.lock_path(worker_id)
        try:
            lock = await wait_until_dropped(path)
        except FileNotFoundError:  # the worker left after the scan
            self._watched.remove(path)
            return
        try:
            if not lock.is_unlinked:
                log.warning("worker_died", pool_id=directory.pool_id, worker_id=worker_id)
                await self._reap(directory, worker_id)
                lock.unlink()
        finally:
            lock.close()
            self._watched.remove(path)
