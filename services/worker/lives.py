"""A worker process lives more than once: who was given up while it did not run, or could not be
heard, drops its work and joins again under another name, with the model that it has loaded.

    announce -> (import, load: the first time) -> join -> serve -> leave
        ▲                                           │ given up
        └───── let go of locks, streams, store ◀────┘
"""

import asyncio
import math
from importlib import import_module
from typing import TYPE_CHECKING

from blockstore.errors import UnknownWorker, WorkerFenced
from blockstore.registry import Role
from services.common.logging import get_logger
from services.worker.config import WorkerSettings
from services.worker.entry import announced

if TYPE_CHECKING:  # It imports torch.
    from services.worker.process import WorkerProcess

log = get_logger(__name__)


async def serve_worker(role: Role, settings: WorkerSettings, stop: asyncio.Event) -> None:
    """Until `stop`, or until it is drained. Raises when engine, pool or store are lost."""
    process: WorkerProcess | None = None
    patience_s = settings.redis_patience_s
    while not stop.is_set():
        try:
            async with announced(role, settings, patience_s) as entry:
                process = process or await _process(role, settings, stop)
                await process.live(entry)
                return
        except* (WorkerFenced, UnknownWorker) as given_up:
            (reason, *_) = _leaves(given_up)
            log.error("worker_given_up", worker_id=entry.worker_id, reason=str(reason))
        if entry.leaving:
            return
        patience_s = math.inf  # it has served: whatever it cannot reach now will be back


async def _process(role: Role, settings: WorkerSettings, stop: asyncio.Event) -> "WorkerProcess":
    """Imports torch for a second, which reads OpenMP's variables: only now are they set."""
    service = await asyncio.to_thread(import_module, f"services.{role}.service")
    from services.worker.process import WorkerProcess

    return WorkerProcess(service.ROLE, settings, stop)


def _leaves(group: BaseExceptionGroup[BaseException]) -> list[BaseException]:
    found: list[BaseException] = []
    for error in group.exceptions:
        found += _leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found
