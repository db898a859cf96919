"""The model queue: sends the first waiting request of a model to a decode and a prefill worker.

The request that is first in order gets the next free decode slots, one for each of its sequences.
Until that many are free, no later request of the model is placed: a request that needs many slots
would never get them otherwise.

See ADR 30.
"""

import asyncio
import contextvars
from typing import NoReturn

from services.gateway.config import PartOptions
from services.gateway.request import sending
from services.gateway.request.events import SlotsAwaited, WorkersAwaited
from services.gateway.request.request import Request
from services.gateway.scheduling.request_queue import RequestQueue
from services.gateway.scheduling.retention import Retention
from services.gateway.scheduling.router import Route, Router, placed, rank_prefill, slots_of
from services.gateway.workers.change_notifier import ChangeNotifier
from services.gateway.workers.directory import WorkerDirectory
from services.gateway.workers.pool import Pool
from services.gateway.workers.worker import Worker
from services.runtime.errors import NoWorker, PromptTooLong

RETRY_S = 0.25
"""The time until decode workers that have refused are asked again, if no change comes before."""

_NO_WORKERS_S = 1.0
"""The time until pools are looked at again without a change: a mover may be tried again after a
failure."""

AT_ONCE = 0.0
"""A delay: the next request may be placed at once."""


class ModelQueue:
    """The waiting requests of one model, and the task that sends them to workers."""

    def __init__(
        self,
        model: str,
        workers: WorkerDirectory,
        router: Router,
        options: PartOptions,
        changes: ChangeNotifier,
        retention: Retention,
    ) -> None:
        self.waiting = RequestQueue[Request]()
        self._model = model
        self._without_workers_since: float | None = None
        """The time at which the model lost its workers; None if it has some, or some are
        starting."""
        self._retention = retention
        self._workers = workers
        self._router = router
        self._options = options
        self._changes = changes
        self._clock = asyncio.get_running_loop().time
        # In a context of its own, the task does not log under the id of its first request.
        self.task = asyncio.create_task(
            self._serve(), name=f"queue {model}", context=contextvars.Context()
        )

    async def _serve(self) -> NoReturn:
        """Place the first request, again and again."""
        while True:
            seen = self._changes.num_changes
            request = self.waiting.first()
            delay_s = None if request is None else await self._place_or_close(request)
            if delay_s == AT_ONCE:
                continue
            if not await self._changes.wait(seen, delay_s):
                self._workers.forget_refusals()

    async def _place_or_close(self, request: Request) -> float:
        """Like `_place`, but an error closes the request and does not end the task."""
        try:
            return await self._place(request)
        except Exception as error:
            request.close(error)
            return AT_ONCE

    async def _place(self, request: Request) -> float:
        """Place the first request if that is possible now. Returns the seconds after which to try
        again if nothing changes before; AT_ONCE: another request may be the first now."""
        num_sequences = request.num_sequences
        complete = self._workers.complete_pools(self._model)
        pools = [pool for pool in complete if pool.max_slots >= num_sequences]
        if not pools:
            reason = f"no decode worker takes {num_sequences} sequences at a time now"
            return self._delay_without_workers(
                request, reason if complete else self._workers.missing(self._model)
            )
        self._without_workers_since = None
        problems = [request.capacity_problem(pool.spec) for pool in pools]
        if all(problems):  # pools may have come and gone since the request was admitted
            request.close(PromptTooLong(problems[0]))
            return AT_ONCE
        fitting = [pool for pool, problem in zip(pools, problems, strict=True) if not problem]
        open_pools = [pool for pool in fitting if pool.has_open(num_sequences)]
        if not open_pools:
            _note_slots(request, fitting)
            return RETRY_S
        for route in await self._routes(request, open_pools):
            if await self._place_on_route(request, route):
                return AT_ONCE
        if request not in self.waiting:
            return AT_ONCE
        _note_slots(request, open_pools)
        return RETRY_S

    async def _routes(self, request: Request, open_pools: list[Pool]) -> list[Route]:
        """The routes of a request, the best first. If it has a detached ticket, it goes on in that
        ticket's pool. If that pool has no slot, a mover copies the KV to another pool; otherwise
        the ticket is aborted, and the request may go to every pool."""
        detached = request.attempt.detached
        prefill_pools: list[Pool] | None = [
            pool
            for pool in self._workers.prefill_pools(self._model)
            if not request.capacity_problem(pool.spec)
        ]
        if detached is not None:
            pool_id, can_copy = detached.ticket.pool_id, self._router.can_copy
            same = [pool for pool in open_pools if pool.spec.pool_id == pool_id]
            if not same and request.is_computed:
                same = [pool for pool in open_pools if can_copy(pool_id, pool.spec.pool_id)]
            if same and request.is_computed:
                return [Route(pool, b"") for pool in same]
            if same:  # the KV is in the swap pool of this pool
                open_pools, prefill_pools = same, None
            else:
                detached.abort()
        return await self._router.routes(
            request, open_pools, prefill_pools, may_pull=request.unsent_prompt_logprobs is None
        )

    async def _place_on_route(self, request: Request, route: Route) -> bool:
        """Reserve slots at a decode worker of the route's pool, if the request needs any, and send
        it on. True: the request was placed, has ended or was requeued, so no other route is
        tried."""
        num_slots = request.num_sequences
        request.output.stats.block_size = route.pool.spec.block_size
        if not num_slots:
            if request not in self.waiting:
                return True
            if is_placed := self._submit(request, route):
                self.waiting.remove(request)
            return is_placed
        for decode in route.pool.open_decode(num_slots):
            if request not in self.waiting:  # the request ended while a worker was asked
                return True
            if not decode.is_open(num_slots):
                continue
            if not await sending.reserve(request, decode, self._options.reserve_timeout_s):
                continue
            if request.is_computed:
                sending.admit(request)
            else:
                await self._retention.apply(request, route.prefill.spec)
                if request not in self.waiting:
                    return True
                if not self._submit(request, route, decode):
                    request.requeue()
                    return True
            self.waiting.remove(request)
            return True
        return False

    def _submit(self, request: Request, route: Route, decode: Worker | None = None) -> bool:
        """Send the request to a prefill worker of the route. False: all of them have left."""
        ranked = rank_prefill(route, request.num_uncomputed)
        if not ranked:
            return False
        decode_id = "" if decode is None else decode.id
        slots = slots_of(route.pool.decode, decode_id, request.num_sequences)
        request.record.note(placed(route, ranked, decode_id, slots))
        pool_id = route.prefill.spec.pool_id
        sending.submit(request, *ranked[0], pool_id, route.root_hash, route.source_pool_id)
        return True

    def _delay_without_workers(self, request: Request, reason: str) -> float:
        """The time that is left for workers to appear; when none is left, the request is closed.
        While workers start, such as after a crash, requests wait longer."""
        if not request.record.ends_with(WorkersAwaited):
            request.record.note(WorkersAwaited(reason))
        now = self._clock()
        is_starting = self._workers.is_starting(self._model)
        if is_starting and now - request.waiting_since < self._options.start_patience_s:
            self._without_workers_since = None
            return _NO_WORKERS_S
        if self._without_workers_since is None:
            self._without_workers_since = now
        since = max(self._without_workers_since, request.waiting_since)
        left_s = since + self._options.patience_s - now
        if left_s > 0:
            return min(left_s, _NO_WORKERS_S)
        request.close(NoWorker(reason))
        return AT_ONCE


def _note_slots(request: Request, pools: list[Pool]) -> None:
    """Note once that the request waits for slots, and the workers that have none."""
    if not request.record.ends_with(SlotsAwaited):
        workers = [worker for pool in pools for worker in pool.decode]
        request.record.note(SlotsAwaited(request.num_sequences, slots_of(workers)))
