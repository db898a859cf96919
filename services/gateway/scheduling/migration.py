"""Migration: decides which running requests move to another decode worker of their pool.

Requests leave a worker that drains, and a worker that runs many more sequences than another one. A
move computes nothing again and copies no KV: the gateway reserves the slots first, and then hands
the tickets over. Requests that move together stop after the same step and continue with the same
step: their messages travel as one, and none of them waits for a step of the others.

See ADR 50.
"""

import asyncio
from collections.abc import Sequence
from typing import NoReturn

from quire.worker_names import worker_name
from services.gateway.identity import client_id
from services.gateway.request.request import Request
from services.gateway.request.sending import request_move, reserve_target
from services.gateway.scheduling.dispatcher import Dispatcher
from services.gateway.workers.change_notifier import ChangeNotifier
from services.gateway.workers.directory import WorkerDirectory
from services.gateway.workers.lease import DecodeReservation
from services.gateway.workers.worker import Worker
from services.runtime.logging import get_logger
from services.runtime.ticks import until_tick

log = get_logger(__name__)

RETRY_S = 0.05
"""How soon to try again while a draining worker has requests that cannot move yet, because their
tickets are in flight."""

MIN_GAP = 4
MIN_RATIO = 1.5
"""A worker has many more sequences than another if it runs at least `MIN_GAP` more, and at least
`MIN_RATIO` times as many."""

MIN_STAY_S = 10.0
"""How long a request that has moved stays, unless its worker drains."""


class Migration:
    """`changes` notifies of every change that may let a request move."""

    def __init__(
        self,
        workers: WorkerDirectory,
        dispatcher: Dispatcher,
        changes: ChangeNotifier,
        reserve_timeout_s: float,
    ) -> None:
        self._workers = workers
        self._dispatcher = dispatcher
        self._changes = changes
        self._reserve_timeout_s = reserve_timeout_s
        self._clock = asyncio.get_running_loop().time
        self._uneven: dict[str, tuple[Worker, Worker]] = {}

    def _movable_requests(self, worker: Worker) -> list[Request]:
        return [each for each in self._dispatcher.requests if each.movable_from is worker]

    # ── drain ────────────────────────────────────────────────────────────────────────────────────

    async def drain_workers(self) -> NoReturn:
        """Move the requests of draining workers, first in order first. A request that finds no slot
        stays where it is."""
        while True:
            seen = self._changes.num_changes
            drains = False
            for pool in self._workers.decode_workers().values():
                for source in pool:
                    if source.draining and source.num_taken_slots:
                        drains = True
                        await self._move_all_from(source, pool)
            await self._changes.wait(seen, RETRY_S if drains else None)

    async def _move_all_from(self, source: Worker, pool: tuple[Worker, ...]) -> None:
        moves = []
        movable = self._movable_requests(source)
        for request in sorted(movable, key=lambda request: request.order):
            if target := _worker_with_most_free_slots(pool, request.num_sequences):
                cause = f"because {worker_name(source.id)} drains"
                moves.append((request, reserve_target(request, target, cause)))
        await self._start_moves(moves)

    # ── rebalance ────────────────────────────────────────────────────────────────────────────────

    async def rebalance(self, interval_s: float) -> NoReturn:
        """Compare the decode workers of each pool every `interval_s` seconds."""
        while True:
            await asyncio.sleep(until_tick(interval_s))
            await self.rebalance_once()

    async def rebalance_once(self) -> None:
        """Move requests between each pair of workers that was already uneven at the last call. A
        pair that is uneven for the first time is only remembered."""
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
        cause = (
            f"because {worker_name(source.id)} ran {source.num_running} sequences and "
            f"{worker_name(target.id)} only {target.num_running}"
        )
        share = source.num_taken_slots / max(source.num_running, source.num_taken_slots)
        num_to_move = round(half * share)
        stayed = [
            each for each in self._movable_requests(source) if now - each.moved_at >= MIN_STAY_S
        ]
        moves = []
        for request in sorted(stayed, key=lambda request: -request.order):
            num_sequences = request.num_sequences
            if num_sequences > num_to_move:
                continue
            if not _has_free_slots(target, num_sequences):
                break
            moves.append((request, reserve_target(request, target, cause)))
            num_to_move -= num_sequences
        await self._start_moves(moves)

    async def _start_moves(self, moves: Sequence[tuple[Request, DecodeReservation]]) -> None:
        """Wait for all answers before the first hand-over: the requests run on meanwhile."""
        timeout_s = self._reserve_timeout_s
        await asyncio.gather(*(target.wait_for_answer(timeout_s) for _, target in moves))
        for request, target in moves:
            try:
                granted = request_move(request, target)
            except Exception as error:  # a fault in one request must not end migration
                request.close(error)
                continue
            log.debug(
                "request_moves",
                request_id=client_id(request.id),
                worker_id=target.worker.id,
                granted=granted,
            )


def _has_free_slots(worker: Worker, num_sequences: int) -> bool:
    """Whether it has so many free slots, as far as this gateway knows."""
    return worker.is_open(num_sequences) and worker.num_free_slots >= num_sequences


def _worker_with_most_free_slots(pool: tuple[Worker, ...], num_sequences: int) -> Worker | None:
    """The worker with most free slots; None if no worker has enough of them."""
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
