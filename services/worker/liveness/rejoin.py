"""Lets a fenced worker rejoin: in the same process, under another name, with the loaded model.

A worker is fenced if it did not run, or was cut off from Redis. Its work is dropped.

    register -> (import, load: the first time) -> join -> serve -> leave
        ▲                                           │ fenced
        └────── drop locks, streams, store ◀────────┘

See ADR 56.
"""

import asyncio
import math
from importlib import import_module
from typing import TYPE_CHECKING

from blockstore.errors import UnknownWorker, WorkerFenced
from blockstore.registry import Role
from blockstore.task_cancellation import cancel_task
from services.common.runtime.logging import get_logger
from services.worker.config import WorkerSettings
from services.worker.liveness.registration import Registration, announced

if TYPE_CHECKING:  # the module imports torch
    from services.worker.process import WorkerProcess

log = get_logger(__name__)


async def serve_worker(role: Role, settings: WorkerSettings, stop: asyncio.Event) -> None:
    """Serve as a worker of this role until `stop`, or until the worker is drained. Raises if
    engine, pool or store are lost."""
    await _Lives(role, settings, stop).run()


class _Lives:
    """The workers of one process: each registers under its own name, after the last was fenced."""

    def __init__(self, role: Role, settings: WorkerSettings, stop: asyncio.Event) -> None:
        self._role = role
        self._settings = settings
        self._stop = stop
        self._process: WorkerProcess | None = None
        self._entry: Registration | None = None

    async def run(self) -> None:
        patience_s = self._settings.redis_patience_s
        while not self._stop.is_set():
            self._entry = None
            try:
                await self._live_until_stopped(patience_s)
                return
            except* (WorkerFenced, UnknownWorker) as given_up:
                (reason, *_) = _leaves(given_up)
                log.error("worker_given_up", worker_id=self._worker_id, reason=str(reason))
            if self._entry is None or self._entry.leaving:
                return
            patience_s = math.inf  # Redis was there before, so wait until it is back

    async def _live(self, patience_s: float) -> None:
        async with announced(self._role, self._settings, patience_s) as self._entry:
            if self._process is None:
                self._process = await _process(self._role, self._settings, self._stop)
            await self._process.live(self._entry)

    async def _live_until_stopped(self, patience_s: float) -> None:
        """Run one worker. A stop before it serves cancels it, whatever it waits for, because no
        gateway has a request at it yet."""
        living = asyncio.create_task(self._live(patience_s))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([living, stopping], return_when=asyncio.FIRST_COMPLETED)
            if living.done() or (self._entry and self._entry.serving):
                await living
            else:
                await cancel_task(living)
        finally:
            stopping.cancel()
            living.cancel()
            await asyncio.wait([living])

    @property
    def _worker_id(self) -> str:
        return "" if self._entry is None else self._entry.worker_id


async def _process(role: Role, settings: WorkerSettings, stop: asyncio.Event) -> "WorkerProcess":
    """Import the modules that need torch, which takes a second. The import reads OpenMP's
    environment variables, so they must be set before."""
    service = await asyncio.to_thread(import_module, f"services.{role}.service")
    from services.worker.process import WorkerProcess

    return WorkerProcess(service.ROLE, settings, stop)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    """The errors in a group and in the groups nested in it."""
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
