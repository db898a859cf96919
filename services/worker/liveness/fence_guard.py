"""What a worker writes and answers counts only while it has not been given up.

Who gives a worker up marks its lock file first, and reads the stamps then; the worker stamps blocks
as its own first (with the answer that gives them to it, see `services.worker.membership`), and
looks at the mark then. So either its blocks are seen to be its own, or it does not write into them.
What it has read counts if it was not given up afterwards: until then nobody else wrote there.

    marked? own blocks | marked? | compute or copy | marked? | complete stamps, answer

The mark lies in the pool's directory, so that a worker that cannot reach the store sees it too.

See ADR 56.
"""

import asyncio
from collections.abc import Sequence
from typing import NoReturn

from blockstore.errors import WorkerFenced
from services.common.pool.locks import WorkerLock
from services.common.runtime.ticks import until_tick
from services.engine.batch import Drawn, Pause, Row
from services.engine.engine import ForwardPass
from services.worker.swap.pool import Copy

_LOOK_S = 0.5


class FenceGuard:
    """Of a worker on one pool, or on several."""

    def __init__(self, locks: Sequence[WorkerLock]) -> None:
        self._locks = locks

    def require(self) -> None:
        """WorkerFenced: it was given up."""
        if any(lock.is_given_up for lock in self._locks):
            raise WorkerFenced("this worker was given up while it did not run")

    async def keep(self) -> NoReturn:
        """Look, also while nothing is computed, until cancelled. WorkerFenced."""
        while True:
            self.require()
            await asyncio.sleep(until_tick(_LOOK_S))

    def for_copies(self, copy: Copy) -> Copy:
        def copy_permitted(pairs: Sequence[tuple[int, int]]) -> None:
            self.require()
            copy(pairs)
            self.require()

        return copy_permitted


class GuardedForward:
    """The engine's thread asks before it writes and before it answers. WorkerFenced: nothing of
    that step counts."""

    def __init__(self, forward: ForwardPass, fence_guard: FenceGuard) -> None:
        self._forward = forward
        self._fence_guard = fence_guard

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        self._fence_guard.require()
        self._forward.copy_blocks(pairs)
        self._fence_guard.require()

    def run(self, rows: Sequence[Row], num_behind: int = 0) -> Sequence[Drawn]:
        self._fence_guard.require()
        drawn = self._forward.run(rows, num_behind)
        self._fence_guard.require()
        return drawn

    def give_way(self, pause: Pause) -> None:
        self._forward.give_way(pause)

    def rest(self) -> None:
        self._forward.rest()
