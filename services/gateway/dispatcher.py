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
from services.common.logging import get_logger
from services.gateway.admission import Admitted
from services.gateway.api import GenerationRequest
from services.gateway.bell import Bell
from services.gateway.journey import Journey, Start
from services.gateway.lane import Lane
from services.gateway.line import Place, ServiceRate
from services.gateway.messages import RequestEvent
from services.gateway.output import Output
from services.gateway.possessions import Entrusted
from services.gateway.router import Pool, Route, Router, choose_prefill
from services.gateway.search import Search
from services.gateway.stage import Stage
from services.gateway.worker import Worker

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
    """`bell` rings when anything changes that may let somebody go on. `on_end` hears of every
    journey that has ended, with its error if it has one."""

    def __init__(
        self,
        workers: Workers,
        router: Router,
        registry: Registry,
        limits: Limits,
        bell: Bell,
        on_end: Callable[[Journey, Exception | None], None],
    ) -> None:
        self._workers = workers
        self._router = router
        self._registry = registry
        self._limits = limits
        self._on_end = on_end
        self._bell = bell
        self._rate = ServiceRate()
        self._lanes: dict[str, Lane] = {}
        self._journeys: dict[str, Journey] = {}
        self._entering: set[str] = set()
        self._searches: dict[str, Search] = {}
        self._closed = False
        self._attempts = _attempts()
        self._clock = asyncio.get_running_loop().time

    @property
    def num_waiting(self) -> int:
        return len(self._entering) + sum(len(lane.line) for lane in self._lanes.values())

    @property
    def num_running(self) -> int:
        return len(self._journeys) - sum(len(lane.line) for lane in self._lanes.values())

    async def close(self) -> None:
        """End everything: clients get Draining. If there is another gateway they go on there, with
        what workers park when our streams to them break after this. Again: no error."""
        self._closed = True
        tasks = [lane.task for lane in self._lanes.values() if lane.task is not None]
        for task in tasks:
            task.cancel()
        # Before anything is awaited: a process that fails may be cancelled here once more.
        for journey in tuple(self._journeys.values()):
            leave = journey.strand if self._workers.others_serve else journey.end
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
        runs = request_id in self._journeys
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
        lane, now = self.lane(model), self._clock()
        if deadline is not None and request_id not in self._journeys:
            pools = self._workers.complete_pools(model)
            if problem := lane.lateness(request, deadline - now, pools, now):
                raise WouldBeLate(problem, self._retry_delay_s())
        lane.num_entering += 1
        try:
            yield
        finally:
            lane.num_entering -= 1

    def _retry_delay_s(self) -> float:
        return self._rate.retry_delay_s(self.num_waiting, self._clock())

    async def enter(self, request: Admitted, output: Output) -> Journey:
        """Put an admitted request in line, or go on with the one that runs here; within `entering`.
        BlockStoreError, Draining, DuplicateRequest."""
        if (running := self._journeys.get(request.request_id)) is not None:
            running.resume(request, output)
            return running
        place = Place(request.priority, await self._registry.next_arrival())
        found = None if request.received is None else await self._find(request)
        if self._closed:
            raise Draining(_STOPPING)
        journey = Journey(request, place, output, self, self._attempts, self._limits.read_window_s)
        self._journeys[journey.id] = journey
        if found is not None:
            journey.adopt(found)
        if journey.stage is not Stage.ENDED:
            self.waits_again(journey)
        return journey

    async def _find(self, request: Admitted) -> Entrusted | None:
        """What another gateway left of a request whose client comes to us."""
        search = self._searches[request.request_id] = Search(request, next(self._attempts))
        workers = self._workers.who_may_have(request.model)
        try:
            return await search.run(workers, self._router, self._limits.reserve_timeout_s)
        finally:
            del self._searches[request.request_id]

    # ── what journeys report ─────────────────────────────────────────────────────────────────────

    def waits_again(self, journey: Journey) -> None:
        lane = self.lane(journey.client.request.model)
        lane.forecast.gave_way(journey)
        if not journey.client.pauses:
            lane.line.join(journey, self._clock())
        self._bell.ring()

    def has_ended(self, journey: Journey, error: Exception | None) -> None:
        client = journey.client
        lane = self.lane(client.request.model)
        lane.line.leave(journey)
        lane.forecast.ended(journey, client.output.num_steps, self._clock())
        self._journeys.pop(journey.id, None)
        self._bell.ring()
        self._on_end(journey, error)

    # ── what workers say ─────────────────────────────────────────────────────────────────────────

    def on_event(self, sender: Worker, event: RequestEvent) -> None:
        if search := self._searches.get(event.request_id):
            search.on_event(sender, event)
        journey = self._journeys.get(event.request_id)
        if journey is None:
            return
        try:
            journey.on_event(sender, event)
        except (
            Exception
        ) as error:  # a fault of ours in one request must not end the worker's stream
            journey.end(error)

    def on_lost(self, worker: Worker, *, died: bool) -> None:
        for search in self._searches.values():
            search.on_lost(worker)
        for journey in tuple(self._journeys.values()):
            journey.on_lost(worker, died=died)

    def on_report(self, worker: Worker) -> None:
        if worker.stalled:
            self._relieve(worker)
        self._bell.ring()

    def on_change(self) -> None:
        self._bell.ring()

    def _relieve(self, stalled: Worker) -> None:
        """What a prefill worker has not begun goes to another one of its pool, if any of them is
        not kept waiting by its store."""
        for request_id in tuple(stalled.errands):
            if (journey := self._journeys.get(request_id)) is None:
                continue
            pools = self._workers.complete_pools(journey.client.request.model)
            if any(not worker.stalled for worker in _prefill_of(stalled.member.pool_id, pools)):
                journey.go_elsewhere()

    # ── placing ──────────────────────────────────────────────────────────────────────────────────

    def lane(self, model: str) -> Lane:
        lane = self._lanes.get(model)
        if lane is None:
            lane = self._lanes[model] = Lane(model)
            # A context of its own: the lane must not log under the id of its first request.
            lane.task = asyncio.create_task(
                self._serve(lane), name=f"lane {model}", context=contextvars.Context()
            )
        return lane

    async def _serve(self, lane: Lane) -> None:
        """Place whoever is first, for ever."""
        while True:
            heard = self._bell.rings
            journey = lane.line.first()
            delay_s = None if journey is None else await self._try(lane, journey)
            if delay_s == AT_ONCE:
                continue
            if not await self._bell.wait(heard, delay_s):
                self._workers.forget_refusals()

    async def _try(self, lane: Lane, journey: Journey) -> float:
        """`_place`, but whatever goes wrong ends this request and not the lane."""
        try:
            return await self._place(lane, journey)
        except Exception as error:
            journey.end(error)
            return AT_ONCE

    async def _place(self, lane: Lane, journey: Journey) -> float:
        """Send the first in line on its way if that is possible now. The answer is after how many
        seconds to try again if nothing is heard: AT_ONCE when there may be another first."""
        num_sequences = journey.num_sequences
        complete = self._workers.complete_pools(lane.model)
        pools = [pool for pool in complete if pool.most_slots >= num_sequences]
        if not pools:
            return self._be_patient(lane, journey)
        lane.deserted_since = None
        request = journey.client.request
        problems = [request.misfit(pool.spec) for pool in pools]
        if all(problems):  # pools may have come and gone since it was admitted
            journey.end(PromptTooLong(problems[0]))
            return AT_ONCE
        if lane.is_late(journey, self._clock()):
            text = "its turn came so late that it could not be done by its deadline any more"
            journey.end(DeadlineExceeded(text))
            return AT_ONCE
        fitting = [pool for pool, problem in zip(pools, problems, strict=True) if not problem]
        open_pools = [pool for pool in fitting if pool.open_decode(num_sequences)]
        if not open_pools:
            return ASK_AGAIN_S
        open_pools = _where_its_blocks_are(journey, open_pools)
        routes = await self._router.routes(request.prompt_token_ids, request.cache_salt, open_pools)
        for route in routes:
            if await self._take(lane, journey, route):
                return AT_ONCE
        return AT_ONCE if journey not in lane.line else ASK_AGAIN_S

    async def _take(self, lane: Lane, journey: Journey, route: Route) -> bool:
        """Reserve on a decode worker of the route's pool and submit to a prefill worker. True:
        nothing more to try for this journey now."""
        num_sequences = journey.num_sequences
        for decode in route.pool.open_decode(num_sequences):
            if journey not in lane.line:  # it has ended while we asked
                return True
            if not decode.is_open(num_sequences):
                continue
            if not await journey.reserve(decode, self._limits.reserve_timeout_s):
                continue
            if journey.can_go_on:
                journey.go_on()
            elif choice := choose_prefill(route, journey.num_uncomputed):
                journey.start(Start(route.pool.spec.pool_id, route.root_hash, *choice))
            else:
                journey.begin_again()
                return True
            lane.line.leave(journey)
            lane.forecast.started(journey, self._clock(), num_sequences)
            self._rate.departed(self._clock())
            return True
        return False

    def _be_patient(self, lane: Lane, journey: Journey) -> float:
        now = self._clock()
        if lane.deserted_since is None:
            lane.deserted_since = now
        since = max(lane.deserted_since, journey.waiting_since)
        left_s = since + self._limits.patience_s - now
        if left_s > 0:
            return left_s
        at_once = f", {journey.num_sequences} sequences at a time" * (journey.num_sequences > 1)
        journey.end(NoWorker(f"no prefill and decode worker serve {lane.model!r} now{at_once}"))
        return AT_ONCE


def _prefill_of(pool_id: str, pools: tuple[Pool, ...]) -> tuple[Worker, ...]:
    return tuple(w for pool in pools if pool.spec.pool_id == pool_id for w in pool.prefill)


def _where_its_blocks_are(journey: Journey, pools: list[Pool]) -> list[Pool]:
    """The pool of its ticket at rest. Where that has no slot, or the ticket is of no use any more,
    the ticket is given up, and every pool will do."""
    if journey.at_rest is None:
        return pools
    pool_id = journey.at_rest.ticket.pool_id
    there = [pool for pool in pools if pool.spec.pool_id == pool_id]
    if not there:
        journey.give_up_ticket()
    return there or pools
