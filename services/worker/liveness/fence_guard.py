"""Stops a worker that was fenced, before it writes blocks or sends results.

Before the block manager fences a worker, it marks the worker's lock file. The worker looks at the
mark around everything that it does with blocks:

    marked? own blocks | marked? | compute or copy | marked? | complete stamps, answer

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
from services.common.pool.locks import WorkerLock
from services.common.runtime.ticks import until_tick
from services.engine.batch import Row, RowResult, Wait
from services.engine.engine import ForwardPass
from services.worker.swap.pool import Copy

_LOOK_S = 0.5


class FenceGuard:
    """Looks at the marks on a worker's locks, one for each pool that it is on."""

    def __init__(self, locks: Sequence[WorkerLock]) -> None:
        self._locks = locks

    def require(self) -> None:
        """Raises WorkerFenced if a lock is marked."""
        if any(lock.is_revoked for lock in self._locks):
            raise WorkerFenced("this worker was given up while it did not run")

    async def keep(self) -> NoReturn:
        """Look every `_LOOK_S` until cancelled, so that an idle worker notices the mark too. Raises
        WorkerFenced."""
        while True:
            self.require()
            await asyncio.sleep(until_tick(_LOOK_S))

    def for_copies(self, copy: Copy) -> Copy:
        """Return `copy` with a look before and after it, which raises WorkerFenced."""

        def copy_permitted(pairs: Sequence[tuple[int, int]]) -> None:
            self.require()
            copy(pairs)
            self.require()

        return copy_permitted


class GuardedForward:
    """A forward pass that looks at the mark before and after each step and copy.

    WorkerFenced: the results of the step must not be used.
    """

    def __init__(self, forward: ForwardPass, fence_guard: FenceGuard) -> None:
        self._forward = forward
        self._fence_guard = fence_guard

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._fence_guard.require()
        self._forward.copy_blocks(pairs)
        self._fence_guard.require()

    def run(self, rows: Sequence[Row], num_waiting: int = 0) -> Sequence[RowResult]:
        self._fence_guard.require()
        drawn = self._forward.run(rows, num_waiting)
        self._fence_guard.require()
        return drawn

    def yield_device(self, wait: Wait) -> None:
        self._forward.yield_device(wait)

    def rest(self) -> None:
        self._forward.rest()
