"""Moves running requests from one decode worker to another of its pool: away from one that leaves,
and from one that has much more than another.

Nothing is computed again and no KV is copied: slots are got there first, then the tickets change
hands. All that move together come to rest with one step and go on with one: what is said about one
of them is said about all in one message, and nobody waits for a step of the others.

See ADR 50 and ADR 90.
"""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import NoReturn, Protocol

from services.common.runtime.logging import get_logger
from services.common.runtime.ticks import until_tick
from services.gateway.change_notifier import ChangeNotifier
from services.gateway.intake.identity import client_id
from services.gateway.request.lifecycle import RequestLifecycle
from services.gateway.workers.worker import Worker

log = get_logger(__name__)

LOOK_AGAIN_S = 0.05
"""While somebody is to be moved that cannot be yet: its ticket is under way."""

MIN_GAP = 4
MIN_RATIO = 1.5
"""One worker has much more than another when it runs so many more sequences, and so many times as
many."""

REST_S = 10.0
"""Who was moved stays for so long, unless its worker leaves."""


class Workers(Protocol):
    """What the mover needs of the fleet."""

    def decode_workers(self) -> Mapping[str, tuple[Worker, ...]]:
        """Those that are connected, also when they take nothing new, by pool."""


class Migration:
    """`changes` rings when anything changes that may let somebody move."""

    def __init__(self, workers: Workers, changes: ChangeNotifier, reserve_timeout_s: float) -> None:
        self._workers = workers
        self._changes = changes
        self._reserve_timeout_s = reserve_timeout_s
        self._clock = asyncio.get_running_loop().time
        self._uneven: dict[str, tuple[Worker, Worker]] = {}

    # ── away from who leaves ─────────────────────────────────────────────────────────────────────

    async def clear_out(self) -> NoReturn:
        """Take what runs at draining workers elsewhere, first in order first. What finds no slot
        goes on where it is."""
        while True:
            heard = self._changes.num_changes
            leaving = False
            for pool in self._workers.decode_workers().values():
                for source in pool:
                    if source.draining and source.guests:
                        leaving = True
                        await self._clear(source, pool)
            await self._changes.wait(heard, LOOK_AGAIN_S if leaving else None)

    async def _clear(self, source: Worker, pool: tuple[Worker, ...]) -> None:
        moves = []
        for lifecycle in sorted(_settled(source), key=lambda lifecycle: lifecycle.position.order):
            if target := _roomiest(pool, lifecycle.num_sequences):
                moves.append(Move(lifecycle, target))
        await self._make(moves)

    # ── from who has much more ───────────────────────────────────────────────────────────────────

    async def rebalance(self, interval_s: float) -> NoReturn:
        """Look every `interval_s`, for ever."""
        while True:
            await asyncio.sleep(until_tick(interval_s))
            await self.look()

    async def look(self) -> None:
        """What is as uneven as at the last look is evened out; what was at the last one only, is
        forgotten."""
        uneven_before, self._uneven = self._uneven, {}
        for pool_id, pool in self._workers.decode_workers().items():
            if pair := _uneven_pair(pool):
                if pair == uneven_before.get(pool_id):
                    await self._even_out(*pair)
                else:
                    self._uneven[pool_id] = pair

    async def _even_out(self, source: Worker, target: Worker) -> None:
        """Move half of what one has more than the other, the youngest first; of several gateways
        each its share."""
        now = self._clock()
        rested = [j for j in _settled(source) if now - j.moved_at >= REST_S]
        half = (source.num_running - target.num_running) // 2
        share = source.num_taken / max(source.num_running, source.num_taken)
        num_to_move = round(half * share)
        youngest = sorted(rested, key=lambda lifecycle: -lifecycle.position.order)
        moves = []
        for lifecycle in youngest:
            num_sequences = lifecycle.num_sequences
            if num_sequences > num_to_move:
                continue
            if not _has_room(target, num_sequences):
                break
            moves.append(Move(lifecycle, target))
            num_to_move -= num_sequences
        await self._make(moves)

    async def _make(self, moves: Sequence["Move"]) -> None:
        """Nobody comes to rest before all have been answered: it runs on meanwhile."""
        await asyncio.gather(*(move.slot.answered(self._reserve_timeout_s) for move in moves))
        for move in moves:
            move.go()


class Move:
    """Of one request, for which a slot counts as taken at the target from now on."""

    def __init__(self, lifecycle: RequestLifecycle, target: Worker) -> None:
        self._lifecycle = lifecycle
        self._target = target
        self.slot = lifecycle.ask_to_move(target)

    def go(self) -> None:
        """Also when it has ended meanwhile, or has gone elsewhere."""
        lifecycle, worker_id = self._lifecycle, self._target.id
        try:
            moves = lifecycle.move(self.slot)
        except Exception as error:  # a fault of ours in one request must not end all moving
            lifecycle.end(error)
            return
        log.debug(
            "request_moves", request_id=client_id(lifecycle.id), worker_id=worker_id, granted=moves
        )


def _settled(worker: Worker) -> Iterator[RequestLifecycle]:
    for guest in tuple(worker.guests):
        if isinstance(guest, RequestLifecycle) and guest.settled_at is worker:
            yield guest


def _has_room(worker: Worker, num_sequences: int) -> bool:
    """As far as is known here."""
    return worker.is_open(num_sequences) and worker.num_free_slots >= num_sequences


def _roomiest(pool: tuple[Worker, ...], num_sequences: int) -> Worker | None:
    """Where there is most room, of those that have it for so many."""
    open_workers = [worker for worker in pool if _has_room(worker, num_sequences)]
    return max(open_workers, key=lambda worker: (worker.num_free_slots, worker.id), default=None)


def _uneven_pair(pool: tuple[Worker, ...]) -> tuple[Worker, Worker] | None:
    """Who has most and who has least, where that is much less."""
    usable = [worker for worker in pool if worker.usable]
    if len(usable) < 2:
        return None
    most = max(usable, key=lambda worker: (worker.num_running, worker.id))
    least = min(usable, key=lambda worker: (worker.num_running, worker.id))
    gap = most.num_running - least.num_running
    if gap < MIN_GAP or most.num_running < MIN_RATIO * least.num_running:
        return None
    return most, least
