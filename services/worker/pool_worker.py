"""The base of both kinds of worker: engine thread, ordered store writes, heartbeat, drain."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from blockstore.registry import Load
from blockstore.store import BlockStore
from services.common.errors import InvalidRequest
from services.common.runtime.logging import get_logger
from services.common.runtime.metrics import WorkerMetrics
from services.common.structured.grammar import Grammar
from services.engine.batch import Fault
from services.engine.engine import Engine
from services.engine.forward import ForwardPass
from services.engine.messages import FailedGroup, Start, StepOutcome
from services.engine.scheduler import Scheduler
from services.engine.sequences.sequence import Rules
from services.engine.speculation.speculation import Speculation
from services.engine.thread import EngineThread
from services.protocol.messages import Abort, Began, Command
from services.protocol.ticket import Adapter, Ticket
from services.worker.adapters import WorkerAdapters
from services.worker.grammars import Grammars
from services.worker.limits import Limits
from services.worker.liveness.heartbeats import Heartbeats
from services.worker.membership import Membership
from services.worker.requests.events import DRAINED, PREEMPTED, Ending, Session
from services.worker.requests.holder_writes import HolderWrites
from services.worker.requests.jobs import Jobs
from services.worker.requests.store_writer import StoreWriter
from services.worker.requests.suspect_queue import SuspectQueue
from services.worker.requests.trace import NO_TRACE, JobTrace, SpansOfJob
from services.worker.step_meter import StepMeter
from services.worker.swap.pool import SwapPool

if TYPE_CHECKING:
    from services.common.tracing.tracer import Tracer

_DRAIN_INTERVAL_S = 0.05

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The parts of a worker. Without `tracer` it reports no spans, without `adapters` it takes
    no requests for adapters, without `grammars` none for structured output. Without `speculation`
    rows get no drafts."""

    store: BlockStore
    membership: Membership
    forward: ForwardPass
    limits: Limits
    metrics: WorkerMetrics
    swap_pool: SwapPool | None = None
    tracer: "Tracer | None" = None
    adapters: WorkerAdapters | None = None
    grammars: Grammars | None = None
    speculation: Speculation | None = None


class PoolWorker(ABC):
    """A worker on one pool, in one event loop. Subclasses move requests through their states."""

    _jobs: Jobs[Any]
    """All requests at this worker."""

    def __init__(self, parts: WorkerParts, *, one_token: bool) -> None:
        """`one_token`: see `Engine`."""
        self.store, self.limits, self.metrics = parts.store, parts.limits, parts.metrics
        self.swap_pool, self.tracer = parts.swap_pool, parts.tracer
        self.adapters, self.grammars = parts.adapters, parts.grammars
        self.spec, self.stamps = parts.membership.spec, parts.membership.stamps
        self.worker_id, self.pool_id = parts.membership.worker_id, self.spec.pool_id
        self.draining = False
        self.drain_asked = asyncio.Event()
        self.sessions: set[Session] = set()
        """The streams of all connected gateways."""
        self.suspects = SuspectQueue()
        self.step_meter = StepMeter()
        loop = asyncio.get_running_loop()
        self._failure: asyncio.Future[None] = loop.create_future()
        self.writer = StoreWriter(self._fail)
        self.holders = HolderWrites(self.store, self.pool_id, self.writer, self.suspects)
        self._heartbeats = Heartbeats(self)
        self._loads: set[asyncio.Task[None]] = set()
        engine = Engine(
            parts.forward,
            Scheduler(self.limits.max_num_batched_tokens, self.limits.max_num_seqs),
            self.stamps,
            one_token=one_token,
            look_ahead=self.limits.look_ahead,
            speculation=parts.speculation,
        )
        self.engine = EngineThread(engine, loop, self._after_step, self._fail)

    async def run(self) -> None:
        """Work until cancelled. Raises the first error of engine, store or a loop: it is fatal."""
        self.engine.start()
        loops = [self.writer.run(), self._heartbeats.run(), *self._loops()]
        tasks = [asyncio.create_task(self._run_loop(loop)) for loop in loops]
        try:
            await self._failure
        finally:
            tasks += self._loads
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self.engine.stop)

    async def _run_loop(self, loop: Coroutine[Any, Any, None]) -> None:
        try:
            await loop
        except Exception as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)

    @property
    def is_idle(self) -> bool:
        """Whether it has no request, and no request is expected back."""
        return not self._jobs and not self.holders.num_returning_waiters

    @property
    def job_added(self) -> asyncio.Event:
        """Set when a request comes."""
        return self._jobs.added

    @property
    def stalled(self) -> bool:
        """Whether this worker begins no request because the store does not answer."""
        return self._heartbeats.overdue

    def _after_step(self, outcome: StepOutcome) -> None:
        if outcome.num_tokens:
            self.metrics.step_s.observe(outcome.duration_s)
            self.metrics.step_tokens.observe(outcome.num_tokens)
            self.step_meter.add(outcome.duration_s, outcome.num_tokens)
        try:
            self._on_outcome(outcome)
        except Exception as error:  # else the rest of the outcome would be lost silently
            self._fail(error)

    def begin(self, ticket: Ticket, session: Session, *, suspect: bool) -> None:
        """Start a group that the engine has, as soon as its grammar is compiled. A grammar that
        cannot be compiled, which its gateway should have found, ends the request."""
        begin = partial(self._begin_ready, ticket, session, suspect=suspect)
        grammar = self._grammar_of(ticket)
        if grammar is None:
            begin()
            return
        assert self.grammars is not None

        def on_compiled(error: BaseException | None) -> None:
            job = self._job_of(ticket.holder_id)
            if error is not None and not isinstance(error, InvalidRequest):
                self._fail(error)
            elif job is None or job.ending:  # it has ended meanwhile
                return
            elif error is None:
                begin()
            else:
                self._end(job, Ending(error=(error.code, str(error))))

        self.grammars.when_compiled(grammar, on_compiled)

    def _begin_ready(self, ticket: Ticket, session: Session, *, suspect: bool) -> None:
        """Start a group that the engine has, once `Began` is written to its gateway: if this worker
        dies, the gateway then knows which requests it had begun. Suspects start one at a time."""
        start = Start(ticket.holder_id)

        def begin() -> None:
            session.send(Began(*ticket.key), then=lambda: self.engine.send(start))

        if suspect:
            self.suspects.enter(ticket.holder_id, begin)
        else:
            begin()

    def trace_of(self, ticket: Ticket, name: str) -> JobTrace:
        """The trace of a new job."""
        if self.tracer is None or not ticket.traceparent:
            return NO_TRACE
        return SpansOfJob(self.tracer, name, ticket, self.worker_id)

    def close_streams(self) -> None:
        """Close all gateway streams cleanly, so that gateways do not count this as a crash: the
        remaining requests continue elsewhere and do not become suspects."""
        for session in self.sessions:
            session.finish()

    def rules(self, ticket: Ticket, prompt_logprobs: int | None = None) -> Rules:
        return Rules.of(
            ticket,
            self.spec.block_size,
            self.limits.eos_token_ids,
            self.limits.max_model_len,
            prompt_logprobs,
            self._grammar_of(ticket),
            self.adapters.get(ticket.adapter) if self.adapters and ticket.adapter else None,
        )

    def with_adapter(self, job: Any, ticket: Ticket, proceed: Callable[[], None]) -> None:
        """Call `proceed` once the ticket's adapter is there, at once if it is. If it cannot be
        loaded, the job ends. `check_tokens` has seen that this worker takes adapters."""
        if ticket.adapter is None or self.adapters is None:
            proceed()
            return
        job.adapter = self.adapters.get(ticket.adapter)
        if job.adapter is not None:
            proceed()
            return

        async def load(adapters: WorkerAdapters, adapter: Adapter) -> None:
            try:
                job.adapter = await adapters.load(adapter)
            except InvalidRequest as error:
                self._end(job, Ending(error=(InvalidRequest.code, str(error))))
            proceed()

        task = asyncio.create_task(self._run_loop(load(self.adapters, ticket.adapter)))
        self._loads.add(task)
        task.add_done_callback(self._loads.discard)

    def _grammar_of(self, ticket: Ticket) -> Grammar | None:
        structure = ticket.sampling.structure
        if structure is None:
            return None
        if self.grammars is None:
            raise InvalidRequest("this worker has no tokenizer for structured output")
        return self.grammars.get(structure)

    def check_tokens(self, ticket: Ticket) -> None:
        """Raises InvalidRequest if the ticket, or its sampling parameters, name a token id beyond
        the vocabulary, or if the tokens of the ticket leave none to draw."""
        prompt, generated = ticket.prompt_token_ids, [s.token_ids for s in ticket.sequences]
        finished = () if ticket.beams is None else (one.token_ids for one in ticket.beams.finished)
        if not generated:
            raise InvalidRequest("a ticket without sequences")
        named = max(ticket.sampling.named_token_ids(), default=0)
        tokens = filter(None, (prompt, *generated, *finished))
        if max(named, *map(max, tokens)) >= self.limits.vocab_size:
            raise InvalidRequest(f"token ids beyond the vocabulary of {self.limits.vocab_size}")
        if ticket.adapter is not None and self.adapters is None:
            raise InvalidRequest(f"this worker takes no adapters, so not {ticket.adapter.name}")
        if self._grammar_of(ticket) is not None and ticket.sampling.beam is not None:
            raise InvalidRequest("a beam search has no structured output")
        # One more token must fit both max_tokens and the context, unless none is drawn.
        longest = min(len(prompt) + ticket.sampling.max_tokens, self.limits.max_model_len) - 1
        if ticket.sampling.pooling is not None:
            longest = self.limits.max_model_len
        length = len(prompt) + max(map(len, generated))
        if length > longest:
            raise InvalidRequest(f"{length} tokens leave none to draw: at most {longest}")

    def retract(self, failed: FailedGroup) -> None:
        """Take all full blocks of a broken group out of the prefix index: the cause may lie in one
        of them, and would break every request that adopts it. Nothing is broken if a grammar cannot
        go on."""
        if failed.fault is Fault.GRAMMAR:
            log.warning("grammar_failed", holder_id=failed.key)
            return
        log.error("sequence_broken", holder_id=failed.key, reason=failed.fault.value)
        self.metrics.num_broken.inc()
        self.holders.retract(failed.blocks)

    def execute(self, session: Session, command: Command) -> None:
        """Execute a gateway's command. InvalidRequest: no worker of this role can."""
        if not isinstance(command, Abort):
            raise InvalidRequest(f"{self.worker_id} takes no {type(command).__name__}")
        self.abort(session, command.request_id, command.attempt, command.index)

    def drain(self) -> int:
        """Accept no new requests; return how many are left to finish."""
        self.draining = True
        self.drain_asked.set()
        return self._on_drain()

    @abstractmethod
    def _on_drain(self) -> int:
        """End what need not finish here; return how many requests are left."""

    async def drained(self) -> None:
        """Return when this draining worker holds nothing: all tickets are claimed or released."""
        while True:
            await self.writer.flush()
            is_idle = not self.num_busy and not self.holders.num_returning_waiters
            if is_idle and not await self._holds_anything():
                return
            await asyncio.sleep(_DRAIN_INTERVAL_S)

    def requeue_all(self) -> None:
        """Requeue all requests at their gateways, to be computed again elsewhere."""
        for job in self._jobs:
            self._end(job, DRAINED)

    async def _holds_anything(self) -> bool:
        for pool_id in self._heartbeats.pool_ids:
            holders = await self.store.holders(pool_id)
            if any(holder.worker_id == self.worker_id for holder in holders):
                return True
        return False

    @abstractmethod
    def abort(
        self, session: Session, request_id: str, attempt: int, index: int | None = None
    ) -> None:
        """End a request, or its sequence `index`. No error if the request is not here."""

    @abstractmethod
    def close(self, session: Session) -> None:
        """End or park the requests of a gateway that is gone."""

    @property
    @abstractmethod
    def num_busy(self) -> int:
        """How many requests still need work at this worker; detached tickets do not."""

    @abstractmethod
    def load(self) -> Load:
        """The load that this worker reports to the registry and its gateways."""

    @abstractmethod
    def _loops(self) -> Sequence[Coroutine[Any, Any, None]]:
        """Loops of the subclass, run beside the heartbeat and the writes."""

    @abstractmethod
    def _on_outcome(self, outcome: StepOutcome) -> None:
        """Apply the outcome of a step."""

    def preempt(self, holder_ids: Sequence[str]) -> None:
        """Preempt these holders. The store repeats a demand until its holder is released."""
        for holder_id in holder_ids:
            job = self._job_of(holder_id)
            if job and not job.ending:
                self.metrics.num_preemptions.inc()
                self._end(job, PREEMPTED)

    @abstractmethod
    def _job_of(self, holder_id: str) -> Any:
        """The job that a preemption of this holder ends; None: there is none."""

    @abstractmethod
    def _end(self, job: Any, ending: Ending) -> None:
        """Begin the early end of a job, unless it is ending already."""
