"""A worker's heartbeats to its pools, which bring the holders that it has to preempt."""

import asyncio
from typing import TYPE_CHECKING, NoReturn

from blockstore.errors import WorkerFenced
from services.common.runtime.ticks import until_tick

if TYPE_CHECKING:  # the module imports this one
    from services.worker.pool_worker import PoolWorker

_HEARTBEAT_S = 0.1
_IDLE_HEARTBEAT_S = 1.0

_STALLED_S = 1.0
"""How overdue a heartbeat's answer must be: a reachable store answers far sooner."""


class Heartbeats:
    """The heartbeats of `worker`, also to its swap pool, which it may not use for long: if a pool's
    ledger is lost, others wait for what each worker holds."""

    def __init__(self, worker: "PoolWorker") -> None:
        pools = (worker.spec, *([worker.swap_pool.spec] if worker.swap_pool else ()))
        self.pool_ids = tuple(spec.pool_id for spec in pools)
        self._worker = worker
        self._answer_due_at = asyncio.get_running_loop().time()

    @property
    def overdue(self) -> bool:
        """Whether the store does not answer."""
        return asyncio.get_running_loop().time() - self._answer_due_at > _STALLED_S

    async def run(self) -> NoReturn:
        """Send heartbeats, preempt what the store demands, and export the load. Raises
        WorkerFenced, and the errors of the store."""
        worker = self._worker
        while True:
            worker.metrics.observe_load(worker.load())
            sent = (worker.store.heartbeat(pool_id, worker.worker_id) for pool_id in self.pool_ids)
            for heartbeat in await asyncio.gather(*sent):  # a pool that recovers delays no other
                if heartbeat.fenced:
                    raise WorkerFenced(f"{worker.worker_id} was fenced")
                worker.preempt(heartbeat.demands)
            self._answer_due_at = asyncio.get_running_loop().time()
            if not worker.is_idle or await self._wait_idle():
                await asyncio.sleep(_HEARTBEAT_S)

    async def _wait_idle(self) -> bool:
        """Wait while the worker is idle, at most until the next idle tick; True: woken before it.

        A new request wakes the worker. So does the store's free-block notifier: blocks were freed,
        or the ledger was lost and this worker has to report that it holds nothing.
        """
        loop, pause_s = asyncio.get_running_loop(), until_tick(_IDLE_HEARTBEAT_S)
        self._answer_due_at = over_at = loop.time() + pause_s
        store, added = self._worker.store, self._worker.job_added
        added.clear()
        rooms = (store.wait_for_room(pool_id, pause_s) for pool_id in self.pool_ids)
        waiting = [asyncio.create_task(wait) for wait in (*rooms, added.wait())]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in waiting:
                task.cancel()
        return loop.time() < over_at
