"""The block manager: reaps dead workers, fences stuck ones, removes pools without an owner, keeps
the memory of pools on GPUs and copies of what is retained, exports pool metrics and audits pools.
It is not on the path of a request: while it is away, only this work waits, and no worker can join a
pool on a GPU."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path

from services.block_manager.auditor import Auditor, LastAudits
from services.block_manager.config import BlockManagerSettings, Timing
from services.block_manager.fencer import Fencer
from services.block_manager.gpu.keeper import Keeper
from services.block_manager.gpu.processes import AllProcesses, GpuProcesses
from services.block_manager.liveness import Liveness, WorkerProcesses
from services.block_manager.reaper import reap
from services.block_manager.retention_copies import RetentionCopies
from services.block_manager.rounds import Connection, RoundRunner
from services.block_manager.survey import Survey, survey
from services.block_manager.sweeper import Sweeper
from services.block_manager.watcher import Watcher
from services.pool.directory import PoolDirectory
from services.runtime.metrics import PoolMetrics

IDLE_SCANS = 8
"""While nobody uses the pools, the time between two rounds is this many scan intervals."""

Check = Callable[[Survey, Connection], Awaitable[None]]


class BlockManager:
    def __init__(
        self,
        settings: BlockManagerSettings,
        runner: RoundRunner,
        metrics: PoolMetrics,
        last_audits: LastAudits,
        listed: GpuProcesses | None = None,
        timing: Timing | None = None,
    ) -> None:
        """`listed` lists the processes of GPUs; None asks their drivers."""
        root: Path = settings.pool_root
        self._timing = timing or Timing()
        self._runner = runner
        self._metrics = metrics
        listed, processes = listed or AllProcesses(), WorkerProcesses()
        liveness = Liveness(processes, listed)
        self._keeper = Keeper(root, processes, listed)
        self._watcher = Watcher(root, self._reap_worker, liveness, metrics.worker_quiet_s.observe)
        self._sweeper = Sweeper(root, settings.pool_grace_s, liveness)
        self._fencer = Fencer(root, settings.fence_after_s, metrics)
        self._auditor = Auditor(metrics, last_audits)
        self._checks: tuple[Check, ...] = (
            self._sweeper.sweep,
            self._fencer.fence_stuck,
            self._auditor.observe,
            RetentionCopies().update,
        )
        self._running: dict[Check, asyncio.Task[bool]] = {}
        self._is_idle = False

    async def run(self) -> None:
        """Run all loops until cancelled."""
        audit_s = self._timing.audit_interval_s
        async with asyncio.TaskGroup() as loops:
            loops.create_task(self._keeper.run())
            loops.create_task(self._watcher.run(self._pause_s))
            run_checks = partial(self._run_checks, loops)
            loops.create_task(self._runner.run_every(self._pause_s, run_checks))
            loops.create_task(self._runner.run_every(lambda: audit_s, self._auditor.audit))

    def _pause_s(self) -> float:
        """Seconds until the next round. It is longer while no pool has requests, no worker starts
        and nothing is wrong. Deaths are noticed without a round."""
        scan_s = self._timing.scan_interval_s
        is_quiet = self._is_idle and not (self._sweeper.has_suspects or self._fencer.has_suspects)
        return IDLE_SCANS * scan_s if is_quiet else scan_s

    async def _run_checks(self, loops: asyncio.TaskGroup, connection: Connection) -> None:
        """Run one round: sweep, fence, observe and copy, each in a task of its own. A task that is
        blocked, for example by a lock, does not delay the others, and the next rounds skip it until
        it ends."""
        self._is_idle = False  # until this round has found out
        await self._keeper.release_removed()
        seen = await survey(connection)
        for check in self._checks:
            if check not in self._running or self._running[check].done():
                running = self._runner.run_once(partial(check, seen))
                self._running[check] = loops.create_task(running)
        await asyncio.wait(self._running.values(), timeout=self._timing.scan_interval_s)
        self._is_idle = seen.is_idle

    async def _reap_worker(self, directory: PoolDirectory, worker_id: str) -> None:
        async def once(connection: Connection) -> None:
            if await reap(connection, directory, worker_id):
                self._metrics.workers_reaped.inc()

        await self._runner.run_until_done(once)
