"""Migration: decides which running requests move to another decode worker of their pool.

Requests leave a worker that drains, and a worker that runs many more sequences than another one. A
move computes nothing again and copies no KV: the gateway reserves the slots first, and then the
tickets change hands. Requests that move together stop after the same step and go on with the same
step: their messages travel as one, and none of them waits for a step of the others.

See ADR 50 and ADR 90.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import NoReturn, Protocol

from services.common.runtime.logging import get_logger
from services.common.runtime.ticks import until_tick
from services.gateway.change_notifier import ChangeNotifier
from services.gateway.intake.identity import client_id
from services.gateway.request.lifecycle import RequestLifecycle
from services.gateway.workers.worker import Worker

log = get_logger(__name__)

LOOK_AGAIN_S = 0.05
"""How soon to look again while a worker that drains has requests that cannot move yet, because
their tickets are under way."""

MIN_GAP = 4
MIN_RATIO = 1.5
"""A worker has many more sequences than another if it runs at least `MIN_GAP` more, and at least
`MIN_RATIO` times as many."""

REST_S = 10.0
"""How long a request that has moved stays, unless its worker drains."""


class Workers(Protocol):
    """The part of the worker directory that migration needs."""

    def decode_workers(self) -> Mapping[str, tuple[Worker, ...]]:
        """The connected decode workers by pool, also those that drain."""


class Requests(Protocol):
    """The part of the dispatcher that migration needs."""

    @property
    def lifecycles(self) -> Collection[RequestLifecycle]: ...


class Migration:
    """`changes` notifies of every change that may let a request move."""

    def __init__(
        self,
        workers: Workers,
        requests: Requests,
        changes: ChangeNotifier,
        reserve_timeout_s: float,
    ) -> None:
        self._workers = workers
        self._requests = requests
        self._changes = changes
        self._reserve_timeout_s = reserve_timeout_s
        self._clock = asyncio.get_running_loop().time
        self._uneven: dict[str, tuple[Worker, Worker]] = {}

    def _movable_requests(self, worker: Worker) -> list[RequestLifecycle]:
        return [each for each in self._requests.lifecycles if each.movable_from is worker]

    # ── drain ────────────────────────────────────────────────────────────────────────────────────

    async def drain_workers(self) -> NoReturn:
        """Move the requests of draining workers, first in order first. A request that finds no slot
        goes on where it is."""
        while True:
            seen = self._changes.num_changes
            drains = False
            for pool in self._workers.decode_workers().values():
                for source in pool:
                    if source.draining and source.num_taken_slots:
                        drains = True
                        await self._clear(source, pool)
            await self._changes.wait(seen, LOOK_AGAIN_S if drains else None)

    async def _clear(self, source: Worker, pool: tuple[Worker, ...]) -> None:
        settled = self._movable_requests(source)
        moves = []
        for lifecycle in sorted(settled, key=lambda lifecycle: lifecycle.position.order):
            if target := _worker_with_most_free_slots(pool, lifecycle.num_sequences):
                moves.append(Move(lifecycle, target))
        await self._make(moves)

    # ── rebalance ────────────────────────────────────────────────────────────────────────────────

    async def rebalance(self, interval_s: float) -> NoReturn:
        """Compare the decode workers of each pool every `interval_s` seconds, for ever."""
        while True:
            await asyncio.sleep(until_tick(interval_s))
            await self.look()

    async def look(self) -> None:
        """Even out each pair of workers that was already uneven at the last look. A pair that is
        uneven for the first time is only remembered."""
        uneven_before, self._uneven = self._uneven, {}
        for pool_id, pool in self._workers.decode_workers().items():
            if pair := _uneven_pair(pool):
                if pair == uneven_before.get(pool_id):
                    await self._balance(*pair)
                else:
                    self._uneven[pool_id] = pair

    async def _balance(self, source: Worker, target: Worker) -> None:
        """Move half of the difference, the youngest requests first. Each gateway moves its share of
        that half."""
        now = self._clock()
        half = (source.num_running - target.num_running) // 2
        share = source.num_taken_slots / max(source.num_running, source.num_taken_slots)
        num_to_move = round(half * share)
        rested = [each for each in self._movable_requests(source) if now - each.moved_at >= REST_S]
        moves = []
        for lifecycle in sorted(rested, key=lambda lifecycle: -lifecycle.position.order):
            num_sequences = lifecycle.num_sequences
            if num_sequences > num_to_move:
                continue
            if not _has_free_slots(target, num_sequences):
                break
            moves.append(Move(lifecycle, target))
            num_to_move -= num_sequences
        await self._make(moves)

    async def _make(self, moves: Sequence["Move"]) -> None:
        """Wait for all answers before the first hand-over: the requests run on meanwhile."""
        await asyncio.gather(*(move.slots.answered(self._reserve_timeout_s) for move in moves))
        for move in moves:
            move.begin()


class Move:
    """The move of one request. Its slots at the target count as taken from now on."""

    def __init__(self, lifecycle: RequestLifecycle, target: Worker) -> None:
        self._lifecycle = lifecycle
        self.slots = lifecycle.reserve_target(target)

    def begin(self) -> None:
        """Ask for the hand-over, unless the request has ended or left meanwhile."""
        lifecycle = self._lifecycle
        try:
            granted = lifecycle.request_move(self.slots)
        except Exception as error:  # a fault in one request must not end migration
            lifecycle.close(error)
            return
        log.debug(
            "request_moves",
            request_id=client_id(lifecycle.id),
            worker_id=self.slots.worker.id,
            granted=granted,
        )


def _has_free_slots(worker: Worker, num_sequences: int) -> bool:
    """Whether it has so many free slots, as far as this gateway knows."""
    return worker.is_open(num_sequences) and worker.num_free_slots >= num_sequences


def _worker_with_most_free_slots(pool: tuple[Worker, ...], num_sequences: int) -> Worker | None:
    """The worker with most free slots; None: no worker has enough of them."""
    open_workers = [worker for worker in pool if _has_free_slots(worker, num_sequences)]
    return max(open_workers, key=lambda worker: (worker.num_free_slots, worker.id), default=None)


def _uneven_pair(pool: tuple[Worker, ...]) -> tuple[Worker, Worker] | None:
    """The workers that run most and least, if the difference is large."""
    usable = [worker for worker in pool if worker.usable]
    if len(usable) < 2:
        return None
    most = max(usable, key=lambda worker: (worker.num_running, worker.id))
    least = min(usable, key=lambda worker: (worker.num_running, worker.id))
    gap = most.num_running - least.num_running
    if gap < MIN_GAP or most.num_running < MIN_RATIO * least.num_running:
        return None
    return most, least
