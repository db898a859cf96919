"""Stops a worker that was fenced, before it writes blocks or sends results.

Before the block manager fences a worker, it marks the worker's lock file. The worker looks at the
mark around everything that it does with blocks:

    marked? own blocks | marked? | compute or copy | marked? | complete stamps, answer

For a step, the engine looks before its launch and after its end on the device (`Engine`): the
worker completes stamps and answers when it retires the step.

- Writes: the block manager sets the mark before it reads the stamps. The worker stamps new blocks
  as its own (when the store grants them, see `services.worker.membership`) before it looks at the
  mark. So either the block manager sees that the blocks belong to the worker, or the worker sees
  the mark and does not write.
- Reads: no other worker writes a block that this worker reads until the mark is set. So a result is
  valid if the mark is not set after the computation.

The mark is in the pool's directory, so a worker that cannot reach the store sees it too.

See ADR 56.
"""

import asyncio
from collections.abc import Sequence
from typing import NoReturn

from blockstore.errors import WorkerFenced
from services.pool.locks import WorkerLock
from services.runtime.ticks import until_tick

_CHECK_S = 0.5


class FenceGuard:
    """Checks the marks on a worker's locks, one for each pool that it is on."""

    def __init__(self, locks: Sequence[WorkerLock]) -> None:
        self._locks = locks

    def check(self) -> None:
        """Raises WorkerFenced if a lock is marked."""
        if any(lock.is_revoked for lock in self._locks):
            raise WorkerFenced("this worker was given up while it did not run")

    async def watch(self) -> NoReturn:
        """Check every `_CHECK_S`, so that an idle worker notices the mark. Raises WorkerFenced."""
        while True:
            self.check()
            await asyncio.sleep(until_tick(_CHECK_S))
