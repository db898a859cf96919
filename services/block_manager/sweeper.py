"""Removes pools and workers without an owner, and ends recoveries, which a dead process left
unfinished.

- A half-made or half-removed pool directory is deleted.
- A pool directory without workers is removed after a grace time, under the host's lock, since a
  worker may be joining. On a GPU the pool may have lost all workers by one fault, and the keeper
  has its memory: the grace time is as long as their restart takes.
- A pool of the store without a directory is dropped after a grace time if no member of the registry
  names it. Pools of other hosts or runs have no directory here, but they have members.
- A worker of the store without a lock file is dead, and is reaped once it can write no more. A
  member on another host has a lease instead, and is reaped once that has ended.
- A recovery that no worker ends is ended.
"""

import asyncio
from contextlib import suppress
from pathlib import Path

from blockstore.errors import LeaseHeld, UnknownPool
from blockstore.records import PoolStats
from services.block_manager.liveness import Liveness
from services.block_manager.rounds import Connection
from services.block_manager.survey import Survey
from services.pool.directory import (
    PoolDirectory,
    incomplete_pools,
    pool_directories,
    remove_incomplete_pools,
)
from services.pool.locks import host_lock
from services.pool.recovery import PoolRecovery
from services.runtime.grace_timer import GraceTimer
from services.runtime.logging import get_logger

log = get_logger(__name__)

_RESTART_S = 30.0


class Sweeper:
    def __init__(self, root: Path, grace_s: float, liveness: Liveness) -> None:
        self._root = root
        self._liveness = liveness
        self._empty = GraceTimer[str](grace_s)
        self._empty_on_gpu = GraceTimer[str](max(grace_s, _RESTART_S))
        self._unowned = GraceTimer[str](grace_s)

    @property
    def has_suspects(self) -> bool:
        """Whether a pool may have no owner: it is in its grace time."""
        return bool(self._empty or self._empty_on_gpu or self._unowned)

    async def sweep(self, seen: Survey, connection: Connection) -> None:
        """Run one round. An error of the store ends the round; the next round does the rest."""
        await self._remove_incomplete()
        await self._remove_empty(connection)
        await self._drop_unowned(connection, seen)
        for directory in pool_directories(self._root):
            if stats := seen.pools.get(directory.pool_id):
                await self._reap_unlocked(connection, directory, stats)
                await self._reopen(connection, directory, stats)

    async def _remove_incomplete(self) -> None:
        if incomplete_pools(self._root):
            async with host_lock(self._root):
                await asyncio.to_thread(remove_incomplete_pools, self._root)

    async def _remove_empty(self, connection: Connection) -> None:
        directories = {found.pool_id: found for found in pool_directories(self._root)}
        empty = [name for name, found in directories.items() if not found.worker_ids()]
        in_files = [name for name in empty if directories[name].is_file_pool]
        overdue = self._empty.check(in_files)
        overdue |= self._empty_on_gpu.check(set(empty) - set(in_files))
        for pool_id in sorted(overdue):
            async with host_lock(self._root):
                if directories[pool_id].worker_ids():
                    continue
                await connection.store.drop_pool(pool_id)
                await asyncio.to_thread(directories[pool_id].remove)
            log.info("pool_removed", pool_id=pool_id)

    async def _drop_unowned(self, connection: Connection, seen: Survey) -> None:
        # Read after `seen`, because a pool gets its directory before the store knows the pool.
        here = {directory.pool_id for directory in pool_directories(self._root)}
        members = {member.pool_id for member in seen.members}
        for pool_id in sorted(self._unowned.check(seen.pool_ids - here - members)):
            await connection.store.drop_pool(pool_id)
            log.info("pool_dropped", pool_id=pool_id)

    async def _reopen(
        self, connection: Connection, directory: PoolDirectory, stats: PoolStats
    ) -> None:
        """End a recovery that no worker ends, because the last missing worker died or was
        fenced."""
        if stats.recovering and not stats.missing_worker_ids:
            with suppress(UnknownPool):
                await PoolRecovery(directory).finish(connection.store)

    async def _reap_unlocked(
        self, connection: Connection, directory: PoolDirectory, stats: PoolStats
    ) -> None:
        # A worker's lock file exists from before the worker joins the pool until after it has left.
        # `stats` was read before the directory, so a worker without a lock file is gone for good,
        # or it is on another host: the store knows whether its lease has ended.
        for worker_id in set(stats.worker_ids) - set(directory.worker_ids()):
            if await asyncio.to_thread(self._liveness.obstacle, directory, worker_id):
                continue
            try:
                num_holders = await connection.store.reap(directory.pool_id, worker_id)
            except LeaseHeld:
                continue
            log.warning(
                "unlocked_worker_reaped",
                pool_id=directory.pool_id,
                worker_id=worker_id,
                num_holders=num_holders,
            )
