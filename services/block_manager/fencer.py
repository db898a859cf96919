"""Fences workers that are alive but stuck: their file locks are held, but their registrations have
expired.

A fenced worker may only release. It keeps its blocks until it dies or releases them, so if it wakes
up and writes, no other worker has those blocks (law 5).
"""

from pathlib import Path

from blockstore.errors import UnknownPool, UnknownWorker
from blockstore.records import PoolStats
from services.block_manager.rounds import Connection
from services.block_manager.survey import Survey
from services.pool.directory import PoolDirectory, pool_directories
from services.pool.locks import is_held, revoke_lock
from services.runtime.grace_timer import GraceTimer
from services.runtime.logging import get_logger
from services.runtime.metrics import PoolMetrics

log = get_logger(__name__)


class Fencer:
    def __init__(self, root: Path, fence_after_s: float, metrics: PoolMetrics) -> None:
        self._root = root
        self._metrics = metrics
        self._silent = GraceTimer[tuple[str, str]](fence_after_s)
        self._announced: set[str] = set()

    @property
    def has_suspects(self) -> bool:
        """Whether a living worker was missing from the registry at the last check."""
        return bool(self._silent)

    async def fence_stuck(self, seen: Survey, connection: Connection) -> None:
        """Fence the workers of this host's pools that have been stuck for `fence_after_s`."""
        stuck = await self._stuck(connection, seen)
        for pool_id, worker_id in sorted(self._silent.check(stuck)):
            # The mark comes before the fence: the worker checks it before it writes, so it writes
            # nothing more once others may get the blocks in its block tables.
            revoke_lock(PoolDirectory(self._root / pool_id).lock_path(worker_id))
            try:
                await connection.store.fence(pool_id, worker_id)
            except (UnknownPool, UnknownWorker):
                continue  # the worker died or left meanwhile
            self._metrics.workers_fenced.inc()
            log.error("worker_fenced", pool_id=pool_id, worker_id=worker_id)

    async def _stuck(self, connection: Connection, seen: Survey) -> set[tuple[str, str]]:
        """Return (pool id, worker id) of each living worker that should be in the registry and is
        not. A worker is on two pools if its pool has a swap pool."""
        stuck = set()
        members, present = seen.member_ids, set[str]()
        for directory in pool_directories(self._root):
            if (stats := seen.pools.get(directory.pool_id)) is None:
                continue
            present.update(stats.worker_ids)
            silent = set(stats.worker_ids) - set(stats.fenced_worker_ids) - members
            for worker_id in silent & await self._expected_in_registry(connection, stats, members):
                if is_held(directory.lock_path(worker_id)):
                    stuck.add((directory.pool_id, worker_id))
        self._announced &= present
        return stuck

    async def _expected_in_registry(
        self, connection: Connection, stats: PoolStats, members: frozenset[str]
    ) -> set[str]:
        """Return the workers that should be in the registry: those that were in it before, hold
        blocks, or are missing in a recovery. A worker that is still starting is none of these."""
        self._announced |= members & set(stats.worker_ids)
        self._announced.update(stats.missing_worker_ids)
        if stats.recovering or set(stats.worker_ids) <= members | self._announced:
            return self._announced
        holders = await connection.store.holders(stats.spec.pool_id)
        return self._announced | {holder.worker_id for holder in holders}
