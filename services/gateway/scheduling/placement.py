"""Placement: sends the first request of each model queue to a decode and a prefill worker.

The request that is first in order gets the next free decode slots, one for each of its sequences.
Until that many are free, no later request of the model is placed: a request that needs many slots
would never get them otherwise.

See ADR 30.
"""

import asyncio
from dataclasses import dataclass
from typing import NoReturn, Protocol

from services.common.errors import DeadlineExceeded, NoWorker, PromptTooLong
from services.gateway.change_notifier import ChangeNotifier
from services.gateway.request.lifecycle import RequestLifecycle
from services.gateway.scheduling.model_queue import ModelQueue
from services.gateway.scheduling.request_queue import ServiceRate
from services.gateway.scheduling.router import Pool, Route, Router, choose_prefill

RETRY_S = 0.25
"""When to ask decode workers again that have refused, if no change is reported before."""

AT_ONCE = 0.0


@dataclass(frozen=True, slots=True)
class Limits:
    """`patience_s`: how long a request waits while no worker can take it at all. `rebalance_s`:
    how often the loads of decode workers are compared; 0: never. `read_window_s`: how long a
    request pauses for a client that does not read."""

    max_waiting: int = 1024
    patience_s: float = 5.0
    reserve_timeout_s: float = 2.0
    rebalance_s: float = 1.0
    read_window_s: float = 10.0


class Workers(Protocol):
    """The part of the worker directory that placement needs."""

    def complete_pools(self, name: str) -> tuple[Pool, ...]: ...

    def forget_refusals(self) -> None: ...


class Placement:
    """`rate` counts the requests that leave a queue."""

    def __init__(
        self,
        workers: Workers,
        router: Router,
        limits: Limits,
        changes: ChangeNotifier,
        rate: ServiceRate,
    ) -> None:
        self._workers = workers
        self._router = router
        self._limits = limits
        self._changes = changes
        self._rate = rate
        self._clock = asyncio.get_running_loop().time

    async def serve(self, queue: ModelQueue) -> NoReturn:
        """Place the first request of a queue, again and again."""
        while True:
            seen = self._changes.num_changes
            lifecycle = queue.waiting.first()
            delay_s = None if lifecycle is None else await self._try(queue, lifecycle)
            if delay_s == AT_ONCE:
                continue
            if not await self._changes.wait(seen, delay_s):
                self._workers.forget_refusals()

    async def _try(self, queue: ModelQueue, lifecycle: RequestLifecycle) -> float:
        """`_place`; a fault closes this request and not the queue."""
        try:
            return await self._place(queue, lifecycle)
        except Exception as error:
            lifecycle.close(error)
            return AT_ONCE

    async def _place(self, queue: ModelQueue, lifecycle: RequestLifecycle) -> float:
        """Place the first request if that is possible now. Returns the seconds after which to try
        again if nothing changes before; AT_ONCE: another request may be first now."""
        num_sequences, request = lifecycle.num_sequences, lifecycle.client.request
        complete = self._workers.complete_pools(queue.model)
        pools = [pool for pool in complete if pool.max_slots >= num_sequences]
        if not pools:
            return self._wait_for_workers(queue, lifecycle)
        queue.without_workers_since = None
        problems = [request.capacity_problem(pool.spec) for pool in pools]
        if all(problems):  # pools may have come and gone since the request was admitted
            lifecycle.close(PromptTooLong(problems[0]))
            return AT_ONCE
        if queue.misses_deadline(lifecycle, self._clock()):
            text = "its turn came so late that it could not be done by its deadline any more"
            lifecycle.close(DeadlineExceeded(text))
            return AT_ONCE
        fitting = [pool for pool, problem in zip(pools, problems, strict=True) if not problem]
        open_pools = [pool for pool in fitting if pool.open_decode(num_sequences)]
        if not open_pools:
            return RETRY_S
        open_pools = _pools_of_ticket(lifecycle, open_pools)
        routes = await self._router.routes(request.prompt_token_ids, request.cache_salt, open_pools)
        for route in routes:
            if await self._take(queue, lifecycle, route):
                return AT_ONCE
        return AT_ONCE if lifecycle not in queue.waiting else RETRY_S

    async def _take(self, queue: ModelQueue, lifecycle: RequestLifecycle, route: Route) -> bool:
        """Reserve slots at a decode worker of the route's pool, and send the request on. True:
        there is nothing more to try for the request now."""
        num_sequences = lifecycle.num_sequences
        for decode in route.pool.open_decode(num_sequences):
            if lifecycle not in queue.waiting:  # it ended while a worker was asked
                return True
            if not decode.is_open(num_sequences):
                continue
            if not await lifecycle.reserve(decode, self._limits.reserve_timeout_s):
                continue
            if lifecycle.is_computed:
                lifecycle.admit()
            elif choice := choose_prefill(route, lifecycle.num_uncomputed):
                lifecycle.submit(*choice, route.pool.spec.pool_id, route.root_hash)
            else:
                lifecycle.requeue()
                return True
            queue.waiting.leave(lifecycle)
            queue.forecast.started(lifecycle, self._clock(), num_sequences)
            self._rate.departed(self._clock())
            return True
        return False

    def _wait_for_workers(self, queue: ModelQueue, lifecycle: RequestLifecycle) -> float:
        """Give workers `patience_s` to appear."""
        now = self._clock()
        if queue.without_workers_since is None:
            queue.without_workers_since = now
        since = max(queue.without_workers_since, lifecycle.waiting_since)
        left_s = since + self._limits.patience_s - now
        if left_s > 0:
            return left_s
        at_once = f", {lifecycle.num_sequences} sequences at a time" * (lifecycle.num_sequences > 1)
        lifecycle.close(
            NoWorker(f"no prefill and decode worker serve {queue.model!r} now{at_once}")
        )
        return AT_ONCE


def _pools_of_ticket(lifecycle: RequestLifecycle, pools: list[Pool]) -> list[Pool]:
    """The pool of its detached ticket. If that has no slot, the ticket is aborted and the request
    may go to every pool."""
    detached = lifecycle.attempt.detached
    if detached is None:
        return pools
    same = [pool for pool in pools if pool.spec.pool_id == detached.ticket.pool_id]
    if not same:
        detached.abort()
    return same or pools
