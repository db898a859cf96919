"""Notices the death of workers: for each worker a thread blocks in flock on the worker's lock file,
until the kernel drops the lock. Then it waits until the worker can write no more."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NoReturn

from services.block_manager.liveness import Liveness
from services.pool.directory import PoolDirectory, pool_directories
from services.pool.locks import wait_until_dropped
from services.runtime.logging import get_logger
from services.runtime.ticks import until_tick

log = get_logger(__name__)

Reap = Callable[[PoolDirectory, str], Awaitable[None]]

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.005, 0.25


class Watcher:
    """Calls `reap(directory, worker_id)` for each worker that is dead and can write no more, while
    holding the worker's lock, and then unlinks the lock file."""

    def __init__(
        self, root: Path, reap: Reap, liveness: Liveness, on_quiet: Callable[[float], object]
    ) -> None:
        """`on_quiet` gets the seconds from a dropped lock until the worker could write no more."""
        self._root = root
        self._reap = reap
        self._liveness = liveness
        self._on_quiet = on_quiet
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
                await self._wait_until_quiet(directory, worker_id)
                await self._reap(directory, worker_id)
                lock.unlink()
                self._liveness.forget(directory, worker_id)
        finally:
            lock.close()
            self._watched.remove(path)

    async def _wait_until_quiet(self, directory: PoolDirectory, worker_id: str) -> None:
        dropped_at, pause_s, known = time.monotonic(), _FIRST_PAUSE_S, ""
        worker = {"pool_id": directory.pool_id, "worker_id": worker_id}
        while obstacle := await asyncio.to_thread(self._liveness.obstacle, directory, worker_id):
            if obstacle != known:
                known = obstacle
                log.warning("worker_not_quiet", **worker, reason=obstacle)
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _LAST_PAUSE_S)
        quiet_s = time.monotonic() - dropped_at
        self._on_quiet(quiet_s)
        if known:
            log.info("worker_quiet", **worker, quiet_ms=round(quiet_s * 1e3, 1))
