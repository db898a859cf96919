"""A worker's heartbeats to its pools, which bring the holders that it has to preempt."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import NoReturn

from blockstore.errors import WorkerFenced
from blockstore.store import BlockStore
from services.runtime.ticks import until_tick

_HEARTBEAT_S = 0.1
_IDLE_HEARTBEAT_S = 1.0


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass(slots=True)
class Heartbeats:
    """The heartbeats of a worker to its pool, and to its swap pool, which it may not use for long:
    if a pool's ledger is lost, others wait for what each worker holds."""

    store: BlockStore
    worker_id: str
    pool_ids: tuple[str, ...]
    _: KW_ONLY
    on_beat: Callable[[], None]
    """Called before each heartbeat."""
    on_demands: Callable[[Sequence[str]], None]
    """Gets the holders that the store wants to be preempted."""
    is_idle: Callable[[], bool]
    """Whether the worker has no request, and no request is expected back."""
    woken: asyncio.Event
    """Set when a request comes."""

    async def run(self) -> NoReturn:
        """Send heartbeats. Raises WorkerFenced, and the errors of the store."""
        while True:
            self.on_beat()
            sent = (self.store.heartbeat(pool_id, self.worker_id) for pool_id in self.pool_ids)
            for heartbeat in await asyncio.gather(*sent):  # a pool that recovers delays no other
                if heartbeat.fenced:
                    raise WorkerFenced(f"{self.worker_id} was fenced")
                self.on_demands(heartbeat.demands)
            if not self.is_idle() or await self._wait_idle():
                await asyncio.sleep(_HEARTBEAT_S)

    async def _wait_idle(self) -> bool:
        """Wait while the worker is idle, at most until the next idle tick; True: woken before it.

        A new request wakes the worker. So does the store's free-block notifier: blocks were freed,
        or the ledger was lost and this worker has to report that it holds nothing.
        """
        pause_s = until_tick(_IDLE_HEARTBEAT_S)
        over_at = _now() + pause_s
        self.woken.clear()
        rooms = (self.store.wait_for_room(pool_id, pause_s) for pool_id in self.pool_ids)
        waiting = [asyncio.create_task(wait) for wait in (*rooms, self.woken.wait())]
        try:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in waiting:
                task.cancel()
        return _now() < over_at
