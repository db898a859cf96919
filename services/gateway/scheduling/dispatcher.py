"""Takes requests from the line to the workers, strictly in order, and brings them what workers say.

One lane per model: its line, and a task that places whoever is first. The first in order gets the
next decode slots, one for each of its sequences; while there are not so many, nobody behind it is
served, so that one that needs many gets them.

See ADR 30.
"""

import asyncio
import contextvars
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from blockstore.records import PoolSpec
from blockstore.registry import Registry
from services.common.errors import (
    DeadlineExceeded,
    Draining,
    DuplicateRequest,
    NoWorker,
    PromptTooLong,
    QueueFull,
    WouldBeLate,
)
from services.common.runtime.logging import get_logger
from services.gateway.change_notifier import ChangeNotifier
from services.gateway.frontend.api import GenerationRequest
from services.gateway.intake.admission import Admitted
from services.gateway.request.leases import Entrusted
from services.gateway.request.lifecycle import RequestLifecycle, Start
from services.gateway.request.status import RequestStatus
from services.gateway.scheduling.model_queue import ModelQueue
from services.gateway.scheduling.parked_lookup import ParkedLookup
from services.gateway.scheduling.request_queue import QueuePosition, ServiceRate
from services.gateway.scheduling.router import Pool, Route, Router, choose_prefill
from services.gateway.streaming.output import Output
from services.gateway.workers.messages import RequestEvent
from services.gateway.workers.worker import Worker

log = get_logger(__name__)

ASK_AGAIN_S = 0.25
"""Decode workers that refused are asked again after this, should nothing be heard from them."""

AT_ONCE = 0.0

_STOPPING = "the gateway is stopping; try again"


def _attempts() -> Iterator[int]:
    """1, 2, 3 ... for all requests together; on the wire an attempt has 32 bits."""
    return (number % (1 << 32) for number in itertools.count(1))


class Workers(Protocol):
    """What the dispatcher needs of the fleet."""

    def complete_pools(self, name: str) -> tuple[Pool, ...]: ...

    def who_may_have(self, name: str) -> tuple[tuple[Worker, PoolSpec], ...]: ...

    @property
    def others_serve(self) -> bool: ...

    def forget_refusals(self) -> None: ...


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


class Dispatcher:
    """`changes` rings when anything changes that may let somebody go on. `on_end` hears of every
    journey that has ended, with its error if it has one."""

    def __init__(
        self,
        workers: Workers,
        router: Router,
        registry: Registry,
        limits: Limits,
        changes: ChangeNotifier,
        on_end: Callable[[RequestLifecycle, Exception | None], None],
    ) -> None:
        self._workers = workers
        self._router = router
        self._registry = registry
        self._limits = limits
        self._on_end = on_end
        self._changes = changes
        self._rate = ServiceRate()
        self._model_queues: dict[str, ModelQueue] = {}
        self._lifecycles: dict[str, RequestLifecycle] = {}
        self._entering: set[str] = set()
        self._lookups: dict[str, ParkedLookup] = {}
        self._closed = False
        self._attempts = _attempts()
        self._clock = asyncio.get_running_loop().time

    @property
    def num_waiting(self) -> int:
        return len(self._entering) + sum(
            len(model_queue.waiting) for model_queue in self._model_queues.values()
        )

    @property
    def num_running(self) -> int:
        return len(self._lifecycles) - sum(
            len(model_queue.waiting) for model_queue in self._model_queues.values()
        )

    async def close(self) -> None:
        """End everything: clients get Draining. If there is another gateway they go on there, with
        what workers park when our streams to them break after this. Again: no error."""
        self._closed = True
        tasks = [
            model_queue.task
            for model_queue in self._model_queues.values()
            if model_queue.task is not None
        ]
        for task in tasks:
            task.cancel()
        # Before anything is awaited: a process that fails may be cancelled here once more.
        for lifecycle in tuple(self._lifecycles.values()):
            leave = lifecycle.strand if self._workers.others_serve else lifecycle.end
            leave(Draining(_STOPPING))
        await asyncio.gather(*tasks, return_exceptions=True)

    # ── in and out ───────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def entering(self, request_id: str, *, resumes: bool = False) -> Iterator[None]:
        """Around admission: the id is taken and a place in the queue kept, before any work is done.
        `resumes`: it may be running here, for a client that has lost its stream. DuplicateRequest,
        QueueFull, Draining."""
        if self._closed:
            raise Draining(_STOPPING)
        runs = request_id in self._lifecycles
        if (runs and not resumes) or request_id in self._entering:
            raise DuplicateRequest("a request with this request_id and resume_token is running")
        if not runs and self.num_waiting >= self._limits.max_waiting:
            text = f"the queue is full ({self.num_waiting} requests wait); try again later"
            raise QueueFull(text, self._retry_delay_s())
        self._entering.add(request_id)
        try:
            yield
        finally:
            self._entering.discard(request_id)

    @contextmanager
    def in_time(
        self, request: GenerationRequest, request_id: str, model: str, deadline: float | None
    ) -> Iterator[None]:
        """Around what is left of admission once the model is known; within `entering`. WouldBeLate:
        it cannot be done by its deadline, a time of the event loop's clock."""
        model_queue, now = self.model_queue(model), self._clock()
        if deadline is not None and request_id not in self._lifecycles:
            pools = self._workers.complete_pools(model)
            if problem := model_queue.lateness(request, deadline - now, pools, now):
                raise WouldBeLate(problem, self._retry_delay_s())
        model_queue.num_entering += 1
        try:
            yield
        finally:
            model_queue.num_entering -= 1

    def _retry_delay_s(self) -> float:
        return self._rate.retry_delay_s(self.num_waiting, self._clock())

    async def enter(self, request: Admitted, output: Output) -> RequestLifecycle:
        """Put an admitted request in line, or go on with the one that runs here; within `entering`.
        BlockStoreError, Draining, DuplicateRequest."""
        if (running := self._lifecycles.get(request.request_id)) is not None:
            running.resume(request, output)
            return running
        position = QueuePosition(request.priority, await self._registry.next_arrival())
        found = None if request.received is None else await self._find(request)
        if self._closed:
            raise Draining(_STOPPING)
        lifecycle = RequestLifecycle(
            request, position, output, self, self._attempts, self._limits.read_window_s
        )
        self._lifecycles[lifecycle.id] = lifecycle
        if found is not None:
            lifecycle.adopt(found)
        if lifecycle.status is not RequestStatus.ENDED:
            self.waits_again(lifecycle)
        return lifecycle

    async def _find(self, request: Admitted) -> Entrusted | None:
        """What another gateway left of a request whose client comes to us."""
        lookup = self._lookups[request.request_id] = ParkedLookup(request, next(self._attempts))
        workers = self._workers.who_may_have(request.model)
        try:
            return await lookup.run(workers, self._router, self._limits.reserve_timeout_s)
        finally:
            del self._lookups[request.request_id]

    # ── what journeys report ─────────────────────────────────────────────────────────────────────

    def waits_again(self, lifecycle: RequestLifecycle) -> None:
        model_queue = self.model_queue(lifecycle.client.request.model)
        model_queue.forecast.gave_way(lifecycle)
        if not lifecycle.client.pauses:
            model_queue.waiting.join(lifecycle, self._clock())
        self._changes.notify()

    def has_ended(self, lifecycle: RequestLifecycle, error: Exception | None) -> None:
        client = lifecycle.client
        model_queue = self.model_queue(client.request.model)
        model_queue.waiting.leave(lifecycle)
        model_queue.forecast.ended(lifecycle, client.output.num_steps, self._clock())
        self._lifecycles.pop(lifecycle.id, None)
        self._changes.notify()
        self._on_end(lifecycle, error)

    # ── what workers say ─────────────────────────────────────────────────────────────────────────

    def on_event(self, sender: Worker, event: RequestEvent) -> None:
        if lookup := self._lookups.get(event.request_id):
            lookup.on_event(sender, event)
        lifecycle = self._lifecycles.get(event.request_id)
        if lifecycle is None:
            return
        try:
            lifecycle.on_event(sender, event)
        except (
            Exception
        ) as error:  # a fault of ours in one request must not end the worker's stream
            lifecycle.end(error)

    def on_lost(self, worker: Worker, *, died: bool) -> None:
        for lookup in self._lookups.values():
            lookup.on_lost(worker)
        for lifecycle in tuple(self._lifecycles.values()):
            lifecycle.on_lost(worker, died=died)

    def on_report(self, worker: Worker) -> None:
        if worker.stalled:
            self._relieve(worker)
        self._changes.notify()

    def on_change(self) -> None:
        self._changes.notify()

    def _relieve(self, stalled: Worker) -> None:
        """What a prefill worker has not begun goes to another one of its pool, if any of them is
        not kept waiting by its store."""
        for request_id in tuple(stalled.prefill_loads):
            if (lifecycle := self._lifecycles.get(request_id)) is None:
                continue
            pools = self._workers.complete_pools(lifecycle.client.request.model)
            if any(not worker.stalled for worker in _prefill_of(stalled.member.pool_id, pools)):
                lifecycle.go_elsewhere()

    # ── placing ──────────────────────────────────────────────────────────────────────────────────

    def model_queue(self, model: str) -> ModelQueue:
        model_queue = self._model_queues.get(model)
        if model_queue is None:
            model_queue = self._model_queues[model] = ModelQueue(model)
            # A context of its own: the lane must not log under the id of its first request.
            model_queue.task = asyncio.create_task(
                self._serve(model_queue), name=f"lane {model}", context=contextvars.Context()
            )
        return model_queue

    async def _serve(self, model_queue: ModelQueue) -> None:
        """Place whoever is first, for ever."""
        while True:
            heard = self._changes.num_changes
            lifecycle = model_queue.waiting.first()
            delay_s = None if lifecycle is None else await self._try(model_queue, lifecycle)
            if delay_s == AT_ONCE:
                continue
            if not await self._changes.wait(heard, delay_s):
                self._workers.forget_refusals()

    async def _try(self, model_queue: ModelQueue, lifecycle: RequestLifecycle) -> float:
        """`_dispatch`, but whatever goes wrong ends this request and not the lane."""
        try:
            return await self._dispatch(model_queue, lifecycle)
        except Exception as error:
            lifecycle.end(error)
            return AT_ONCE

    async def _dispatch(self, model_queue: ModelQueue, lifecycle: RequestLifecycle) -> float:
        """Send the first in line on its way if that is possible now. The answer is after how many
        seconds to try again if nothing is heard: AT_ONCE when there may be another first."""
        num_sequences = lifecycle.num_sequences
        complete = self._workers.complete_pools(model_queue.model)
        pools = [pool for pool in complete if pool.most_slots >= num_sequences]
        if not pools:
            return self._be_patient(model_queue, lifecycle)
        model_queue.deserted_since = None
        request = lifecycle.client.request
        problems = [request.misfit(pool.spec) for pool in pools]
        if all(problems):  # pools may have come and gone since it was admitted
            lifecycle.end(PromptTooLong(problems[0]))
            return AT_ONCE
        if model_queue.is_late(lifecycle, self._clock()):
            text = "its turn came so late that it could not be done by its deadline any more"
            lifecycle.end(DeadlineExceeded(text))
            return AT_ONCE
        fitting = [pool for pool, problem in zip(pools, problems, strict=True) if not problem]
        open_pools = [pool for pool in fitting if pool.open_decode(num_sequences)]
        if not open_pools:
            return ASK_AGAIN_S
        open_pools = _where_its_blocks_are(lifecycle, open_pools)
        routes = await self._router.routes(request.prompt_token_ids, request.cache_salt, open_pools)
        for route in routes:
            if await self._take(model_queue, lifecycle, route):
                return AT_ONCE
        return AT_ONCE if lifecycle not in model_queue.waiting else ASK_AGAIN_S

    async def _take(
        self, model_queue: ModelQueue, lifecycle: RequestLifecycle, route: Route
    ) -> bool:
        """Reserve on a decode worker of the route's pool and submit to a prefill worker. True:
        nothing more to try for this journey now."""
        num_sequences = lifecycle.num_sequences
        for decode in route.pool.open_decode(num_sequences):
            if lifecycle not in model_queue.waiting:  # it has ended while we asked
                return True
            if not decode.is_open(num_sequences):
                continue
            if not await lifecycle.reserve(decode, self._limits.reserve_timeout_s):
                continue
            if lifecycle.can_go_on:
                lifecycle.go_on()
            elif choice := choose_prefill(route, lifecycle.num_uncomputed):
                lifecycle.start(Start(route.pool.spec.pool_id, route.root_hash, *choice))
            else:
                lifecycle.begin_again()
                return True
            model_queue.waiting.leave(lifecycle)
            model_queue.forecast.started(lifecycle, self._clock(), num_sequences)
            self._rate.departed(self._clock())
            return True
        return False

    def _be_patient(self, model_queue: ModelQueue, lifecycle: RequestLifecycle) -> float:
        now = self._clock()
        if model_queue.deserted_since is None:
            model_queue.deserted_since = now
        since = max(model_queue.deserted_since, lifecycle.waiting_since)
        left_s = since + self._limits.patience_s - now
        if left_s > 0:
            return left_s
        at_once = f", {lifecycle.num_sequences} sequences at a time" * (lifecycle.num_sequences > 1)
        lifecycle.end(
            NoWorker(f"no prefill and decode worker serve {model_queue.model!r} now{at_once}")
        )
        return AT_ONCE


def _prefill_of(pool_id: str, pools: tuple[Pool, ...]) -> tuple[Worker, ...]:
    return tuple(w for pool in pools if pool.spec.pool_id == pool_id for w in pool.prefill)


def _where_its_blocks_are(lifecycle: RequestLifecycle, pools: list[Pool]) -> list[Pool]:
    """The pool of its ticket at rest. Where that has no slot, or the ticket is of no use any more,
    the ticket is given up, and every pool will do."""
    if lifecycle.at_rest is None:
        return pools
    pool_id = lifecycle.at_rest.ticket.pool_id
    there = [pool for pool in pools if pool.spec.pool_id == pool_id]
    if not there:
        lifecycle.give_up_ticket()
    return there or pools
