"""Lets a worker rejoin in the same process, under another name: a fenced worker with the loaded
model, and a worker that reloads with the new weights that its process has read.

A worker is fenced if it did not run, or was cut off from Redis. Its work is dropped.

    register -> (import, load: the first time) -> join -> serve -> leave
        ▲                                           │ fenced     │ reloads
        └────── drop locks, streams, store ◀────────┴────────────┘

See ADR 56.
"""

import asyncio
import math
import os
from importlib import import_module
from typing import TYPE_CHECKING

from blockstore.errors import UnknownWorker, WorkerFenced
from blockstore.task_cancellation import cancel_task
from services.runtime.logging import get_logger
from services.runtime.starting import importing
from services.worker.config import WorkerSettings
from services.worker.liveness.registration import Registration, registered

if TYPE_CHECKING:  # the module imports torch
    from services.worker.process import WorkerProcess

_NICENESS = 5
"""Added to the niceness of all threads of a worker: while CPUs are short, gateway and block store
get one sooner."""

log = get_logger(__name__)


async def serve_worker(settings: WorkerSettings, stop: asyncio.Event) -> None:
    """Serve until `stop`, or until the worker is drained. Raises if engine, pool or store fail."""
    os.nice(_NICENESS)  # before any thread starts that computes: threads inherit it
    await _RejoiningWorker(settings, stop).run()


class _RejoiningWorker:
    """Runs one worker after another: when one is fenced or reloads, the next registers under a new
    name."""

    def __init__(self, settings: WorkerSettings, stop: asyncio.Event) -> None:
        self._settings = settings
        self._stop = stop
        self._process: WorkerProcess | None = None
        self._registration: Registration | None = None
        self._reloads = False

    async def run(self) -> None:
        patience_s = self._settings.redis_patience_s
        while not self._stop.is_set():
            self._registration = None
            try:
                await self._serve_until_stopped(patience_s)
            except* (WorkerFenced, UnknownWorker) as errors:
                worker_id = self._registration.worker_id if self._registration else ""
                log.error("worker_given_up", worker_id=worker_id, reason=str(_first(errors)))
            if self._registration is None or self._registration.leaving:
                return
            self._reloads = self._registration.forget_worker()
            patience_s = math.inf  # Redis was there before, so wait until it is back

    async def _serve(self, patience_s: float) -> None:
        role = self._process.role if self._process else self._settings.role
        async with registered(self._settings, role, patience_s) as self._registration:
            if self._process is None:
                self._process = await _import_process(self._settings, self._stop)
            await self._process.serve(self._registration, reloads=self._reloads)

    async def _serve_until_stopped(self, patience_s: float) -> None:
        """Run one worker. A stop before it serves cancels it, whatever it waits for, because no
        gateway has a request at it yet."""
        serving = asyncio.create_task(self._serve(patience_s))
        stopping = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
            if serving.done() or (self._registration and self._registration.serving):
                await serving
            else:
                await cancel_task(serving)
        finally:
            stopping.cancel()
            serving.cancel()
            await asyncio.wait([serving])


async def _import_process(settings: WorkerSettings, stop: asyncio.Event) -> "WorkerProcess":
    """Import the modules that need torch, which takes a second. The import reads OpenMP's
    environment variables, so they must be set before."""
    with importing():
        process = await asyncio.to_thread(import_module, "services.worker.process")
        made: WorkerProcess = process.WorkerProcess(settings, stop)
        return made


def _first(error: BaseException) -> BaseException:
    """The first error of a group that is no group itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
