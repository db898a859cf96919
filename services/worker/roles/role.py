"""The common part of prefill and decode: the life of a job from its adapter to its end."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterable, Sequence
from functools import partial
from typing import Any, ClassVar, Generic

from blockstore.errors import StaleHolder
from blockstore.registry import Load
from services.engine import messages
from services.engine.messages import Start
from services.engine.sequences.results import Advance
from services.protocol.messages import Abort, Began, Command, WorkerEvent
from services.protocol.worker_stream import StreamType
from services.runtime.errors import InvalidRequest
from services.worker.pool_engine import PoolEngine
from services.worker.requests.events import (
    DRAINED,
    EXPIRED,
    HANDED_OVER,
    PREEMPTED,
    STALE,
    Ending,
    Session,
    poisoned,
    report,
)
from services.worker.requests.jobs import J, Jobs, State


class Role(ABC, Generic[J]):
    """The requests at a worker in one role, and what the worker does with them."""

    stream: ClassVar[StreamType]
    """The stream over which gateways send commands."""

    def __init__(self, worker: PoolEngine) -> None:
        self.worker = worker
        self.jobs: Jobs[J] = Jobs(self.end, worker.job_added)
        self.running: dict[str, J] = {}
        """The jobs whose blocks the engine uses or is about to use, by holder id."""

    # Commands of gateways.

    def execute(self, session: Session, command: Command) -> None:
        """Execute a gateway's command. Raises InvalidRequest if it is for another role."""
        if not isinstance(command, Abort):
            raise InvalidRequest(f"{self.worker.worker_id} takes no {type(command).__name__}")
        self.abort(session, command.request_id, command.attempt, command.index)

    @abstractmethod
    def abort(
        self, session: Session, request_id: str, attempt: int, index: int | None = None
    ) -> None:
        """End a request, or its sequence `index`. No error if the request is not here."""

    @abstractmethod
    def close(self, session: Session) -> None:
        """End or park the requests of a gateway that is gone."""

    # What the worker asks.

    @property
    def num_busy(self) -> int:
        """How many requests still need work at this worker; detached tickets do not."""
        return sum(job.state is not State.DETACHED for job in self.jobs)

    @abstractmethod
    def load(self) -> Load:
        """The requests of this role, without the worker's steps."""

    @abstractmethod
    def on_drain(self) -> None:
        """End what need not finish here: the worker takes no new requests."""

    @abstractmethod
    def loops(self) -> Iterable[Coroutine[Any, Any, None]]:
        """Loops to run beside the worker's own."""

    def requeue_all(self) -> None:
        """Requeue all requests at their gateways, to be computed again elsewhere."""
        for job in self.jobs:
            self.end(job, DRAINED)

    def preempt(self, holder_ids: Sequence[str]) -> None:
        """Preempt these holders. The store repeats a demand until its holder is released."""
        for holder_id in holder_ids:
            job = self.running.get(holder_id) or self.jobs.detached(holder_id)
            if job and not job.ending:
                self.worker.metrics.num_preemptions.inc()
                self.end(job, PREEMPTED)

    def on_advances(self, advances: Sequence[Advance]) -> None:
        """Apply what a step did with the groups of this role."""
        for advance in advances:
            job = self.running[advance.key]
            if advance.fault is None:
                self._on_advance(job, advance)
            else:
                self.worker.retract(advance, advance.fault)
                self.release(job, job.ending or poisoned(advance.fault))

    @abstractmethod
    def _on_advance(self, job: J, advance: Advance) -> None:
        """Apply the progress of a group, or its end."""

    # The life of a job.

    def accept(self, job: J, name: str, stage: str, proceed: Callable[[], None]) -> None:
        """Begin the trace and the time limit of a job, and call `proceed` once its adapter is
        loaded. If the adapter cannot be loaded, the job ends."""
        worker, ticket = self.worker, job.ticket
        if worker.tracer is not None and ticket.traceparent:
            job.trace.begin(worker.tracer, name, ticket, worker.worker_id)
            job.trace.enter(stage)
        if ticket.timeout_ms:
            self.jobs.end_after(ticket.timeout_ms / 1000, job, EXPIRED)
        adapter, adapters = ticket.adapter, worker.adapters
        if adapter is None or adapters is None:
            proceed()
            return
        job.adapter = adapters.get(adapter)
        if job.adapter is not None:
            proceed()
            return

        async def load() -> None:
            try:
                job.adapter = await adapters.load(adapter)
            except InvalidRequest as error:
                self.end(job, Ending(error=(InvalidRequest.code, str(error))))
            proceed()

        worker.start(load())

    def begin(self, job: J) -> None:
        """Start a job whose group the engine has, as soon as its grammar is compiled. A grammar
        that cannot be compiled, which its gateway should have found, ends the job."""
        grammar = self.worker.grammar_of(job.ticket)
        if grammar is None:
            self._begin_ready(job)
            return

        async def begin() -> None:
            failure: InvalidRequest | None = None
            try:
                await asyncio.shield(asyncio.wrap_future(grammar.compiled))
            except InvalidRequest as error:
                failure = error
            if job.state is not State.RUNNING or job.ending:  # it has ended meanwhile
                return
            if failure is None:
                self._begin_ready(job)
            else:
                self.end(job, Ending(error=(failure.code, str(failure))))

        self.worker.start(begin())

    def _begin_ready(self, job: J) -> None:
        """Start a group once `Began` is written to its gateway: if this worker dies, the gateway
        then knows which requests it had begun."""
        ticket, session = job.ticket, job.session
        start = partial(self.worker.engine.send, Start(ticket.holder_id))
        session.send(Began(*ticket.key, ticket.num_cached_tokens), then=start)

    def end(self, job: J, ending: Ending) -> None:
        """Begin an early end. Only a hand-over that is under way can still change into another
        ending; any other ending is final."""
        if job.ending is not None:
            if job.ending is HANDED_OVER:
                job.ending = ending
            return
        job.ending = ending
        if job.state is State.RUNNING:
            self.worker.engine.send(messages.Remove(job.ticket.holder_id))
        elif job.state is State.DETACHED:
            self.take_back(job, ending)

    def detach(self, job: J, event: Callable[[], WorkerEvent], outcome: str | Ending) -> None:
        """Let a job wait for a claim: no worker writes its blocks before. The event is sent once
        the store has detached the holder, unless another gateway has the request by then.

        The epoch of the ticket is already the one after the detach.
        """
        worker, session, ticket = self.worker, job.session, job.ticket

        async def detach() -> None:
            job.trace.enter("store detach")
            try:
                await worker.store.detach(worker.pool_id, ticket.holder_id, ticket.holder_epoch - 1)
            except StaleHolder:  # a worker has claimed it: there is nothing to offer
                job.trace.end(STALE)
                self.forget(job)
                report(session, ticket, STALE)
            else:
                job.trace.end(outcome)
                if not job.ending and job.session is session:
                    session.send(event())

        self._stop(job)
        job.state = State.DETACHED
        self.jobs.end_after(worker.limits.ticket_ttl_s, job, STALE)
        worker.writer.put(detach)

    def take_back(self, job: J, ending: Ending) -> None:
        """Release a detached ticket, and report `ending` unless a worker has claimed the ticket."""

        async def take_back() -> None:
            await self.worker.holders.release_detached(job.session, job.ticket, ending)
            self.forget(job)

        self.worker.writer.put(take_back)

    def release(self, job: J, ending: Ending) -> None:
        """End a job that is no longer in the engine: release its blocks, and report its end."""
        job.trace.end(ending)
        self.forget(job)
        self.worker.holders.end(job.session, job.ticket, ending)

    def forget(self, job: J) -> None:
        """Remove a job. No error if it is removed already."""
        job.trace.end(job.ending or "finished")
        self._stop(job)
        job.state = State.ENDED
        self.jobs.remove(job)

    def _stop(self, job: J) -> None:
        """Note that the engine no longer has a job."""
        if self.running.get(job.ticket.holder_id) is job:
            del self.running[job.ticket.holder_id]
