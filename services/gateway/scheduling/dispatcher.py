"""Dispatcher: holds the requests of this gateway, and passes the messages of workers to them.

`enqueue` queues a request under its model. Each model has a queue and a task that places the first
request of the queue (`services.gateway.scheduling.model_queue`).
"""

import asyncio
import itertools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from blockstore.registry import Registry
from services.gateway.config import PartOptions
from services.gateway.identity import client_id
from services.gateway.request import worker_events
from services.gateway.request.events import MAX_LISTED, Holders
from services.gateway.request.request import Pull, Request
from services.gateway.request.resuming import adopt, resume
from services.gateway.request.status import RequestStatus
from services.gateway.scheduling.model_queue import ModelQueue
from services.gateway.scheduling.parked_lookup import ParkedLookup
from services.gateway.scheduling.retention import Retention
from services.gateway.scheduling.router import Router
from services.gateway.workers.change_notifier import ChangeNotifier
from services.gateway.workers.directory import WorkerDirectory
from services.gateway.workers.lease import DetachedTicket
from services.gateway.workers.worker import Worker
from services.protocol.messages import DrainNotice, Event, LoadReport, Reserved
from services.protocol.ticket import queue_order
from services.runtime.errors import Draining, DuplicateRequest, QueueFull

_STOPPING = "the gateway is stopping; try again"
RETRY_DELAY_S = 1.0
"""When a client that was refused may try again."""
_SHARES = 4
"""A client's share of the waiting places is one part of so many."""


def _attempt_numbers() -> Iterator[int]:
    """1, 2, 3 ... for all requests of this gateway; on the wire an attempt has 32 bits."""
    return (number % (1 << 32) for number in itertools.count(1))


class Dispatcher:
    """Holds the requests of this gateway by id, and the model queues.

    `changes` notifies of every change that may let a request continue. `on_end` is called with each
    request that has ended, and its error if it has one. `pull` copies KV between pools.
    """

    def __init__(
        self,
        workers: WorkerDirectory,
        router: Router,
        registry: Registry,
        options: PartOptions,
        changes: ChangeNotifier,
        on_end: Callable[[Request, Exception | None], None],
        pull: Pull,
    ) -> None:
        self._workers = workers
        self._router = router
        self._registry = registry
        self._options = options
        self._on_end = on_end
        self.pull = pull
        self._changes = changes
        self.retention = Retention(router, workers, options)
        self._model_queues: dict[str, ModelQueue] = {}
        self._requests: dict[str, Request] = {}
        self._admitting: dict[str, str] = {}
        """The client of each request in admission, by the request's id."""
        self._lookups: dict[str, ParkedLookup] = {}
        self._draining = self._closed = False
        self.attempt_numbers = _attempt_numbers()
        self._clock = asyncio.get_running_loop().time

    @property
    def requests(self) -> Collection[Request]:
        return self._requests.values()

    @property
    def _num_queued(self) -> int:
        return sum(len(queue.waiting) for queue in self._model_queues.values())

    def num_waiting_for(self, model: str) -> int:
        """Requests in the model's queue."""
        queue = self._model_queues.get(model)
        return len(queue.waiting) if queue else 0

    @property
    def num_admitting(self) -> int:
        """Requests in admission."""
        return len(self._admitting)

    @property
    def num_waiting(self) -> int:
        return self.num_admitting + self._num_queued

    @property
    def num_running(self) -> int:
        return len(self._requests) - self._num_queued

    @property
    def is_draining(self) -> bool:
        return self._draining

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests with Draining, and wait at most `limit_s` until none runs."""
        self._draining = True
        await self.wait_until_idle(limit_s)

    async def wait_until_idle(self, limit_s: float) -> None:
        """Wait at most `limit_s` until no request runs."""
        until = self._clock() + limit_s
        while self._requests or self._admitting:
            seen = self._changes.num_changes
            if not await self._changes.wait(seen, max(0.0, until - self._clock())):
                return

    async def close(self) -> None:
        """Close every request with Draining. If another gateway serves, clients resume there with
        the tickets that workers park when this gateway's streams break. A second call does
        nothing."""
        self._draining = self._closed = True
        tasks = [queue.task for queue in self._model_queues.values()]
        for task in tasks:
            task.cancel()
        # Before anything is awaited: a process that fails may be cancelled here once more.
        for request in tuple(self._requests.values()):
            request.close(Draining(_STOPPING), aborts=not self._workers.another_gateway_serves)
        await asyncio.gather(*tasks, return_exceptions=True)

    # ── admission ────────────────────────────────────────────────────────────────────────────────

    @contextmanager
    def admitting(self, request_id: str, client: str, *, resumes: bool = False) -> Iterator[None]:
        """Wraps the admission of a request: takes its id and a place in the queue before any work
        is done. A request that `resumes` may already run here, since its client has lost the
        stream. Raises DuplicateRequest, QueueFull, Draining."""
        if self._draining:
            raise Draining(_STOPPING)
        runs = request_id in self._requests
        if (runs and not resumes) or request_id in self._admitting:
            raise DuplicateRequest("a request with this request_id and resume_token is running")
        if not runs and (problem := self._room_problem(client)):
            raise QueueFull(problem, RETRY_DELAY_S)
        self._admitting[request_id] = client
        try:
            yield
        finally:
            del self._admitting[request_id]
            if self._draining:
                self._changes.notify()

    def _room_problem(self, client: str) -> str:
        """Why no further request of the client can wait; "" if one can. A client that holds its
        share of the places gets no more while others wait, and leaves a share free for those who
        come."""
        most, num_waiting = self._options.max_waiting, self.num_waiting
        if num_waiting >= most:
            return f"the queue is full ({num_waiting} requests wait); try again later"
        num_own = sum(one == client for one in self._admitting.values())
        num_own += sum(queue.waiting.num_of(client) for queue in self._model_queues.values())
        share = max(1, most // _SHARES)
        if num_own < share or num_own == num_waiting < most - share:
            return ""
        return (
            f"{num_own} requests of this client wait, which has a share of {share} of the queue's "
            f"{most} places while others wait; try again later"
        )

    async def enqueue(self, request: Request, *, resumes: bool = False) -> Request:
        """Queue a request; within `admitting`. Returns the request that goes on: the one that runs
        here already, if the call resumes it. Raises BlockStoreError, Draining,
        DuplicateRequest."""
        if (running := self._requests.get(request.id)) is not None:
            resume(running, request)
            return running
        order = queue_order(request.asked.priority, await self._registry.next_arrival())
        found = await self._find_parked(request) if resumes else None
        if self._closed:
            raise Draining(_STOPPING)
        request.begin(self, order)
        request.record.num_queued = self.num_waiting_for(request.model)
        self._requests[request.id] = request
        if found is not None:
            adopt(request, found)
        if request.status is not RequestStatus.ENDED:
            self.on_queued(request)
        return request

    async def _find_parked(self, request: Request) -> DetachedTicket | None:
        """The ticket that another gateway parked, for a request whose client resumes here."""
        lookup = self._lookups[request.id] = ParkedLookup(request, next(self.attempt_numbers))
        workers = self._workers.parked_lookup_workers(request.model)
        try:
            return await lookup.run(workers, self._router, self._options.reserve_timeout_s)
        finally:
            del self._lookups[request.id]

    # ── events of requests ───────────────────────────────────────────────────────────────────────

    def on_queued(self, request: Request) -> None:
        client, has_run = request.asked.caller.client, request.started_at is not None
        waiting = self.model_queue(request.model).waiting
        waiting.add(request, request.order, client, has_run=has_run)
        self._changes.notify()

    def on_closed(self, request: Request, error: Exception | None) -> None:
        self.model_queue(request.model).waiting.remove(request)
        self._requests.pop(request.id, None)
        self._changes.notify()
        self._on_end(request, error)

    def holders(self, pool_id: str) -> Holders:
        """The requests of this gateway that hold most blocks of a pool, and about how many."""
        spec = self._workers.spec(pool_id)
        size = 1 if spec is None else spec.block_size
        held = [
            (client_id(each.id), -(-each.num_tokens // size))
            for each in self._requests.values()
            if each.pool_held == pool_id
        ]
        return tuple(sorted(held, key=lambda one: -one[1])[:MAX_LISTED])

    # ── events of workers ────────────────────────────────────────────────────────────────────────

    def on_event(self, sender: Worker, event: Event) -> None:
        match event:
            case LoadReport():
                sender.report(event)
                if sender.draining or self.num_waiting_for(sender.member.model):
                    self._changes.notify()  # otherwise no request can go on because of this report
                return
            case DrainNotice():
                sender.draining = True
                self.on_change()
                return
            case Reserved():
                sender.unresponsive = False
        if lookup := self._lookups.get(event.request_id):
            lookup.on_event(sender, event)
        request = self._requests.get(event.request_id)
        if request is None:
            return
        try:
            worker_events.on_event(request, sender, event)
        except Exception as error:  # a fault in one request must not end the worker's stream
            request.close(error)

    def on_lost(self, worker: Worker, *, died: bool) -> None:
        for lookup in self._lookups.values():
            lookup.on_lost(worker)
        for request in tuple(self._requests.values()):
            worker_events.on_lost(request, worker, died=died)

    def on_change(self) -> None:
        self._workers.look_again()
        self._changes.notify()

    # ── model queues ─────────────────────────────────────────────────────────────────────────────

    def model_queue(self, model: str) -> ModelQueue:
        queue = self._model_queues.get(model)
        if queue is None:
            queue = self._model_queues[model] = ModelQueue(
                model, self._workers, self._router, self._options, self._changes, self.retention
            )
        return queue
