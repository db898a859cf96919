"""The block manager: watches, reaps, sweeps, fences, observes and audits, each in a loop of its
own. It is not on the path of a request; while it is away, only these wait."""

import asyncio
from pathlib import Path

from services.block_manager.auditor import Auditor
from services.block_manager.config import BlockManagerSettings
from services.block_manager.fencer import Fencer
from services.block_manager.link import Connection, Link
from services.block_manager.reaper import reap
from services.block_manager.sweeper import Sweeper
from services.block_manager.watcher import Watcher
from services.common.metrics import PoolMetrics
from services.common.pool.directory import PoolDirectory


class BlockManager:
    def __init__(self, settings: BlockManagerSettings, link: Link, metrics: PoolMetrics) -> None:
        root: Path = settings.pool_root
        self._settings = settings
        self._link = link
        self._metrics = metrics
        self._watcher = Watcher(root, self._bury)
        self._sweeper = Sweeper(root, settings.pool_grace_s)
        self._fencer = Fencer(root, settings.fence_after_s, metrics)
        self._auditor = Auditor(metrics)

    async def run(self) -> None:
        """Until cancelled."""
        scan_s, audit_s = self._settings.scan_interval_s, self._settings.audit_interval_s
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._watcher.run(scan_s))
            loops.create_task(self._link.every(scan_s, self._sweeper.sweep))
            loops.create_task(self._link.every(scan_s, self._fencer.look))
            loops.create_task(self._link.every(scan_s, self._auditor.observe))
            loops.create_task(self._link.every(audit_s, self._auditor.audit))

    async def _bury(self, directory: PoolDirectory, worker_id: str) -> None:
        async def once(connection: Connection) -> None:
            if await reap(connection, directory, worker_id):
                self._metrics.workers_reaped.inc()

        await self._link.until_done(once)
