"""The decode worker: claims detached tickets and generates their tokens in one continuous batch.

It detaches a request again when another worker is to continue it
(`services.decode.detached_tickets`).
"""

from collections.abc import Coroutine, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from blockstore.errors import NotHeld, StaleHolder
from blockstore.records import Claim
from blockstore.registry import Load
from services.common.errors import DuplicateRequest, InvalidRequest
from services.common.runtime.logging import get_logger
from services.decode.block_extender import BlockExtender
from services.decode.detached_tickets import DetachedTickets
from services.decode.job import Job, State, living_of, take_outputs, ticket_of
from services.decode.swapping import Swapping
from services.decode.tables import blocks_in_no_table, check_detached
from services.engine import messages
from services.engine.messages import Advance, Removed, StepOutcome
from services.engine.sequences.beam_group import group_class
from services.protocol.messages import (
    Admit,
    Command,
    Failed,
    Generated,
    HandOver,
    Reserve,
    Reserved,
    Resume,
    Step,
)
from services.protocol.ticket import Ticket
from services.worker.pool_worker import PoolWorker, WorkerParts
from services.worker.requests.events import (
    ABORTED,
    EXPIRED,
    FORGED,
    HANDED_OVER,
    PREEMPTED,
    STALE,
    Ending,
    Session,
    poisoned,
    report,
)
from services.worker.requests.jobs import Jobs

log = get_logger(__name__)


class DecodeWorker(PoolWorker):
    """Takes a request from reservation to end.

        reserve -> admit (claim) -> one token of each sequence a step -> finish

    A request may end early at any point, or be handed over: then a worker claims its ticket.
    """

    def __init__(self, parts: WorkerParts) -> None:
        super().__init__(parts, one_token=False)
        self._extender = BlockExtender(self)
        self._jobs: Jobs[Job] = Jobs(self._end)
        self._running: dict[str, Job] = {}
        self._detached = DetachedTickets(self, self._jobs)
        self._swapping: Swapping | None = None
        if self.swap_pool is not None:
            on_copied = self._detached.put_swapped
            self._swapping = Swapping(self.swap_pool, on_copied, self._on_swap_refused)

    # Commands of gateways.

    def execute(self, session: Session, command: Command) -> None:
        match command:
            case Reserve(request_id, attempt, num_sequences):
                self.reserve(session, request_id, attempt, num_sequences)
            case Admit(ticket, suspect):
                self.admit(session, ticket, suspect=suspect)
            case HandOver(request_id, attempt):
                self.hand_over(session, request_id, attempt)
            case Resume(ticket):
                self.resume(session, ticket)
            case _:
                super().execute(session, command)

    def reserve(self, session: Session, request_id: str, attempt: int, num_sequences: int) -> None:
        """Keep decode slots free until the request is admitted or aborted, and report `Reserved`:
        granted, unless the worker drains, has too few free slots or knows this attempt."""
        job = Job(session, request_id, attempt, num_sequences)
        granted = (
            not self.draining
            and 0 < num_sequences <= self._num_free_slots
            and job not in self._jobs
        )
        if granted:
            self._jobs.add(job)
        session.send(Reserved(request_id, attempt, granted))

    def admit(self, session: Session, ticket: Ticket, *, suspect: bool = False) -> None:
        """Continue a detached ticket for which decode slots are reserved. Raises InvalidRequest if
        none are, or if the ticket is inconsistent."""
        job = self._jobs.get(session, *ticket.key)
        if job is None or job.state is not State.RESERVED:
            raise InvalidRequest(f"no slots are reserved for attempt {ticket.attempt}")
        self._check(ticket, job.num_sequences)
        job.ticket, job.suspect = ticket, suspect
        job.living = {sequence.index for sequence in ticket.sequences}
        job.state = State.CLAIMING
        job.trace = self.trace_of(ticket, "decode worker")
        job.trace.enter("store claim")
        if ticket.timeout_ms:
            self._jobs.end_after(ticket.timeout_ms / 1000, job, EXPIRED)
        self.with_adapter(job, ticket, lambda: self.writer.put(lambda: self._claim(job, ticket)))

    def abort(
        self, session: Session, request_id: str, attempt: int, index: int | None = None
    ) -> None:
        """End a request, or one of its sequences. No error if it is not here. A single beam cannot
        be aborted: the call is ignored."""
        job = self._jobs.get(session, request_id, attempt)
        if job is None or (index is not None and job.searches):
            return
        if index is None or job.living == {index}:
            self._end(job, ABORTED)
        elif index in job.living:
            self._drop(job, index)

    def hand_over(self, session: Session, request_id: str, attempt: int) -> None:
        """Detach a request once its steps in flight are retired, and requeue it, unless it ends
        before."""
        job = self._jobs.get(session, request_id, attempt)
        if job and job.state in (State.CLAIMING, State.RUNNING):
            self._end(job, HANDED_OVER)

    def resume(self, session: Session, wanted: Ticket) -> None:
        """Give this gateway a request that is parked, or that still runs for a gateway which has
        lost the client. The answer is a requeue: with blocks if a request here continues `wanted`
        (`Job.continues`), else without. Raises InvalidRequest if this attempt is here already."""
        if self._jobs.get(session, *wanted.key):
            raise InvalidRequest(f"attempt {wanted.attempt} of this request is here already")
        job = next((job for job in self._jobs if job.continues(wanted)), None)
        if job is None:
            report(session, wanted, STALE)
            return
        job.session.send(
            Failed(job.request_id, job.attempt, DuplicateRequest.code, _CONTINUED_ELSEWHERE)
        )
        self._jobs.remove(job)
        job.session, job.attempt = session, wanted.attempt
        job.ticket = replace(ticket_of(job), attempt=wanted.attempt)
        if wanted.sampling.beam is None:
            for index in job.living.difference(state.index for state in wanted.sequences):
                self._drop(job, index)
        self._jobs.add(job)
        if job.state is State.DETACHED:
            self._detached.offer(job)
        else:
            self._end(job, HANDED_OVER)

    def close(self, session: Session) -> None:
        """End the reservations of a gateway that is gone, and park its requests for
        `park_window_s`."""
        window_s = self.limits.park_window_s
        for job in self._jobs.of(session):
            if not window_s or not job.has_blocks:
                self._end(job, ABORTED)
                continue
            if job.state is not State.DETACHED:
                self._end(job, HANDED_OVER)
            self._jobs.end_after(window_s, job, STALE)

    def _on_drain(self) -> int:
        for job in self._jobs:
            if job.ticket and job.ticket.swapped:
                self._jobs.end_after(self.limits.ticket_ttl_s, job, STALE)
        return self.num_busy

    @property
    def num_busy(self) -> int:
        return sum(job.state is not State.DETACHED for job in self._jobs)

    def load(self) -> Load:
        return Load(
            num_running=len(self._running),
            num_free_slots=self._num_free_slots,
            **self.step_meter.figures(),
        )

    @property
    def _num_free_slots(self) -> int:
        return self.limits.max_num_seqs - sum(job.num_slots for job in self._jobs)

    # States of a job: RESERVED -> CLAIMING -> RUNNING -> (DETACHED) -> ENDED.

    async def _claim(self, job: Job, ticket: Ticket) -> None:
        block_ids = chain.from_iterable(sequence.block_ids for sequence in ticket.sequences)
        try:
            claim = await self.store.claim(
                *(self.pool_id, ticket.holder_id, ticket.holder_epoch, self.worker_id),
                tuple(dict.fromkeys(block_ids)),
            )
        except (StaleHolder, NotHeld) as error:
            self._forget(job)
            ending = None if job.ending is HANDED_OVER else job.ending
            refused = STALE if isinstance(error, StaleHolder) else FORGED
            job.trace.end(ending or refused)
            report(job.session, ticket_of(job), ending or refused)
            return
        job.ticket = replace(living_of(job), holder_epoch=claim.epoch)
        if detached := self._detached.get(ticket.holder_id):
            self._detached.forget(detached)  # this worker claimed back a ticket that it detached
        if job.ending:
            self._leave(job, job.ticket, job.ending)
        else:
            self._run(job, job.ticket, claim)

    def _run(self, job: Job, ticket: Ticket, claim: Claim) -> None:
        """Give a claimed ticket to the engine, unless the stamps of its blocks do not match its
        tokens: then its blocks are released and it is computed again."""
        key, epoch = ticket.holder_id, ticket.holder_epoch
        spare, finished = blocks_in_no_table(ticket, claim, self.stamps)
        group = group_class(ticket).to_continue(
            ticket, self.rules(ticket), spare, claim.num_acquired
        )
        if not group.is_stamped(self.stamps):
            log.error("kv_corrupt", holder_id=ticket.holder_id)
            self.metrics.kv_corrupt.inc()
            self._release(job, ticket, STALE)
            return
        job.state = State.RUNNING
        job.trace.enter("decode steps")
        self._running[key] = job
        self.holders.give_back(ticket, finished)
        self._extender.add(key, epoch, claim.num_acquired)
        self._extender.want(key, group.total_wanted(self.limits.look_ahead))
        self.engine.send(messages.Admit(group, is_started=False))
        self.begin(ticket, job.session, suspect=job.suspect)

    def _on_outcome(self, outcome: StepOutcome) -> None:
        outputs: dict[Session, list[Generated]] = {}
        for advance in outcome.advances:
            job = self._running[advance.key]
            if tokens := self._on_advance(job, advance):
                outputs.setdefault(job.session, []).extend(tokens)
        for session, generated in outputs.items():
            session.send(Step(tuple(generated)))
        for advance in outcome.advances:
            self.suspects.leave(advance.key)
        for failed in outcome.failed:
            self.retract(failed)
            job = self._running[failed.key]
            self._release(job, ticket_of(job), job.ending or poisoned(failed.fault))
        for removed in outcome.removed:
            self._retire(self._running[removed.key], removed)

    def _on_advance(self, job: Job, advance: Advance) -> Sequence[Generated]:
        """Return what the gateway gets of this step; nothing if it has aborted the request."""
        job.trace.note_step(len(advance.tokens))
        ticket = ticket_of(job)  # now: a detach may change the epoch before the commit
        if advance.completed:
            self.writer.put(lambda: self.holders.commit(ticket, advance.completed))
        if advance.remaining is None:
            self.holders.give_back(ticket, advance.freed)
            self._extender.want(advance.key, advance.wanted_blocks)
        else:
            if not job.ending:
                job.trace.end("finished")
            self._release(job, ticket, ABORTED)
        if job.ending == ABORTED:
            return []
        outputs = take_outputs(job, advance)
        self.metrics.generation_tokens.inc(sum(len(one.token_ids) for one in outputs))
        for one in advance.verified:
            self.metrics.num_drafts.inc()
            self.metrics.num_draft_tokens.inc(one.num_drafts)
            self.metrics.num_accepted_tokens.inc(one.num_accepted)
        return outputs

    # Early ends.

    def _end(self, job: Job, ending: Ending) -> None:
        """Begin an early end. Only a hand-over that is under way can still change into another
        ending; any other ending is final."""
        before, job.ending = job.ending, job.ending or ending
        if before is HANDED_OVER:
            job.ending = ending
        elif before:
            return
        elif job.state is State.RESERVED:
            self._forget(job)
        elif job.state is State.RUNNING:
            self.suspects.withdraw(ticket_of(job).holder_id)
            self.engine.send(messages.Remove(ticket_of(job).holder_id))
        elif job.state is State.DETACHED:
            self._detached.take_back(job, ending)

    def _drop(self, job: Job, index: int) -> None:
        """End one of several sequences; its gateway no longer wants it."""
        job.living.remove(index)
        if job.state is State.RUNNING:
            self.engine.send(messages.AbortSequence(ticket_of(job).holder_id, index))
        elif job.state is State.DETACHED:
            job.ticket = living_of(job)

    def _retire(self, job: Job, removed: Removed) -> None:
        """Continue the early end of a group that the engine has removed."""
        ticket = replace(ticket_of(job), sequences=removed.sequences, beams=removed.beams)
        # Without sequences: the last one ended in a step that was in flight.
        ending = job.ending if removed.sequences else ABORTED
        assert ending is not None
        self._leave(job, ticket, ending)

    def _leave(self, job: Job, ticket: Ticket, ending: Ending) -> None:
        """Release the blocks of a request that is no longer in the engine, or keep them for the
        worker that claims the ticket, or copy them to the swap pool and release them then."""
        self._stop_running(job)
        others, swapping = map(ticket_of, self._running.values()), self._swapping
        if ending is HANDED_OVER:
            job.trace.end(ending)
            self._detached.put(job, ticket)
        elif ending is PREEMPTED and swapping and swapping.is_worthwhile(ticket, others):
            job.trace.enter("swap out")
            swapping.begin(job, ticket)
        else:
            self._release(job, ticket, ending)

    def _on_swap_refused(self, job: Job) -> None:
        """Release a preempted request that the swap pool did not take: it is computed again."""
        self.metrics.num_swaps_refused.inc()
        self._release(job, ticket_of(job), job.ending or PREEMPTED)

    def _release(self, job: Job, ticket: Ticket, ending: Ending) -> None:
        job.trace.end(ending)
        self._forget(job)
        self.holders.end(job.session, ticket, ending)

    def _forget(self, job: Job) -> None:
        self._stop_running(job)
        job.state = State.ENDED
        self._jobs.remove(job)

    def _stop_running(self, job: Job) -> None:
        if job.state is State.RUNNING:
            self._running.pop(ticket_of(job).holder_id, None)
            self._extender.remove(ticket_of(job).holder_id)

    def _job_of(self, holder_id: str) -> Job | None:
        return self._running.get(holder_id) or self._detached.get(holder_id)

    def _loops(self) -> Sequence[Coroutine[Any, Any, None]]:
        loops: list[Coroutine[Any, Any, None]] = [self._extender.run()]
        return loops if self._swapping is None else [*loops, self._swapping.run()]

    def _check(self, ticket: Ticket, num_slots: int) -> None:
        self.check_tokens(ticket)
        check_detached(ticket, self.spec, num_slots)
        claim = ticket.holder_id, ticket.holder_epoch
        if any(job.claim == claim for job in self._jobs):
            raise InvalidRequest("this worker has already claimed this ticket")


_CONTINUED_ELSEWHERE = "another gateway continues this request"
