"""The decode role: claims detached tickets and generates their tokens in one continuous batch.

It detaches a request again when another worker is to continue it. A detached ticket waits until
another worker, or this one, claims it. The worker releases its blocks if it is aborted, if the
store demands its blocks, or if its time limit expires.
"""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from blockstore.errors import NotHeld, StaleHolder
from blockstore.records import Claim
from blockstore.registry import Load
from services.engine import messages
from services.engine.sequences.beam_group import group_class
from services.engine.sequences.results import Advance
from services.protocol.messages import (
    Admit,
    Command,
    Failed,
    Generated,
    HandOver,
    Requeued,
    RequeueReason,
    Reserve,
    Reserved,
    Resume,
    Step,
)
from services.protocol.ticket import Swapped, Ticket
from services.protocol.worker_stream import DECODE
from services.runtime.errors import DuplicateRequest, InvalidRequest
from services.runtime.logging import get_logger
from services.worker.pool_engine import PoolEngine
from services.worker.requests.events import (
    ABORTED,
    FORGED,
    HANDED_OVER,
    PREEMPTED,
    STALE,
    Ending,
    Session,
    report,
    without_blocks,
)
from services.worker.requests.jobs import Key, State
from services.worker.roles.block_extender import BlockExtender
from services.worker.roles.decode_job import DecodeJob
from services.worker.roles.role import Role
from services.worker.roles.tables import blocks_in_no_table, check_detached

_CONTINUED_ELSEWHERE = "another gateway continues this request"

log = get_logger(__name__)


class Decode(Role[DecodeJob]):
    """Takes a request from reservation to end.

        reserve -> admit (claim) -> one token of each sequence a step -> finish

    A request may end early at any point, or be handed over: then a worker claims its ticket.
    """

    stream = DECODE

    def __init__(self, worker: PoolEngine) -> None:
        super().__init__(worker)
        self._extender = BlockExtender(worker, self.preempt)
        self._reserved: dict[Key, tuple[Session, int]] = {}
        """The gateway and the number of the decode slots that are kept for each attempt."""
        self._swapping = asyncio.Lock()
        self._outputs: dict[Session, list[Generated]] = {}
        """The outputs of the step that is being applied, for each gateway."""

    # Commands of gateways.

    def execute(self, session: Session, command: Command) -> None:
        match command:
            case Reserve(request_id, attempt, num_sequences):
                self.reserve(session, request_id, attempt, num_sequences)
            case Admit(ticket):
                self.admit(session, ticket)
            case HandOver(request_id, attempt):
                self.hand_over(session, request_id, attempt)
            case Resume():
                self.resume(session, command)
            case _:
                super().execute(session, command)

    def reserve(self, session: Session, request_id: str, attempt: int, num_sequences: int) -> None:
        """Keep decode slots free until the request is admitted or aborted, and report `Reserved`:
        granted, unless the worker drains, has too few free slots or knows this attempt."""
        key = id(session), request_id, attempt
        granted = (
            not self.worker.draining
            and 0 < num_sequences <= self._num_free_slots
            and key not in self._reserved
            and self.jobs.get(session, request_id, attempt) is None
        )
        if granted:
            self._reserved[key] = session, num_sequences
        session.send(Reserved(request_id, attempt, granted))

    def admit(self, session: Session, ticket: Ticket) -> None:
        """Continue a detached ticket for which decode slots are reserved. Raises InvalidRequest if
        none are, or if the ticket is inconsistent."""
        key = id(session), *ticket.key
        if key not in self._reserved:
            raise InvalidRequest(f"no slots are reserved for attempt {ticket.attempt}")
        self._check(ticket, self._reserved[key][1])
        del self._reserved[key]
        job, writer = DecodeJob(session, ticket), self.worker.writer
        self.jobs.add(job)
        self.accept(
            job, "decode worker", "store claim", lambda: writer.put(lambda: self._claim(job))
        )

    def abort(
        self, session: Session, request_id: str, attempt: int, index: int | None = None
    ) -> None:
        """End a request, or one of its sequences. No error if it is not here. A single beam cannot
        be aborted: the call is ignored."""
        if index is None:
            self._reserved.pop((id(session), request_id, attempt), None)
        job = self.jobs.get(session, request_id, attempt)
        if job is None or (index is not None and job.searches):
            return
        if index is None or job.living == {index}:
            self.end(job, ABORTED)
        elif index in job.living:
            self._drop(job, index)

    def hand_over(self, session: Session, request_id: str, attempt: int) -> None:
        """Detach a request once its steps in flight are retired, and requeue it, unless it ends
        before."""
        job = self.jobs.get(session, request_id, attempt)
        if job and job.state in (State.CLAIMING, State.RUNNING):
            self.end(job, HANDED_OVER)

    def resume(self, session: Session, wanted: Resume) -> None:
        """Give this gateway a request that is parked, or that still runs for a gateway which has
        lost the client. The answer is a requeue: with blocks if the request is here, else without.
        Raises InvalidRequest if this attempt is here."""
        if self.jobs.get(session, *wanted.key) or (id(session), *wanted.key) in self._reserved:
            raise InvalidRequest(f"attempt {wanted.attempt} of this request is here already")
        job = next((job for job in self.jobs if job.is_wanted(wanted)), None)
        if job is None:
            session.send(Requeued(*wanted.key, RequeueReason.STALE_TICKET))
            return
        job.session.send(Failed(*job.ticket.key, DuplicateRequest.code, _CONTINUED_ELSEWHERE))
        self.jobs.remove(job)
        job.session, job.ticket = session, replace(job.ticket, attempt=wanted.attempt)
        self.jobs.add(job)
        if job.state is State.DETACHED:
            self._offer(job)
        else:
            self.end(job, HANDED_OVER)

    def close(self, session: Session) -> None:
        """End the reservations of a gateway that is gone, and park its requests for
        `park_window_s`."""
        for key in [key for key, (owner, _) in self._reserved.items() if owner is session]:
            del self._reserved[key]
        window_s = self.worker.limits.park_window_s
        for job in self.jobs.of(session):
            if not window_s or not job.has_blocks:
                self.end(job, ABORTED)
                continue
            if job.state is not State.DETACHED:
                self.end(job, HANDED_OVER)
            self.jobs.end_after(window_s, job, STALE)

    def on_drain(self) -> None:
        for job in self.jobs:
            if job.ticket.swapped:
                self.jobs.end_after(self.worker.limits.ticket_ttl_s, job, STALE)

    def requeue_all(self) -> None:
        self._reserved.clear()
        super().requeue_all()

    @property
    def num_busy(self) -> int:
        return super().num_busy + len(self._reserved)

    def load(self) -> Load:
        return Load(
            num_running=len(self.running),
            num_free_slots=self._num_free_slots,
        )

    def loops(self) -> Iterable[Coroutine[Any, Any, None]]:
        return [self._extender.run()]

    @property
    def _num_free_slots(self) -> int:
        reserved = sum(num_slots for _, num_slots in self._reserved.values())
        used = sum(job.num_slots for job in self.jobs)
        return self.worker.limits.max_num_seqs - reserved - used

    # States of a job: CLAIMING -> RUNNING -> (SWAPPING) -> (DETACHED) -> ENDED.

    async def _claim(self, job: DecodeJob) -> None:
        worker, ticket = self.worker, job.ticket
        block_ids = chain.from_iterable(sequence.block_ids for sequence in ticket.sequences)
        try:
            claim = await worker.store.claim(
                worker.pool_id,
                ticket.holder_id,
                ticket.holder_epoch,
                worker.worker_id,
                tuple(dict.fromkeys(block_ids)),
            )
        except (StaleHolder, NotHeld) as error:
            ending = None if job.ending is HANDED_OVER else job.ending
            refused = STALE if isinstance(error, StaleHolder) else FORGED
            job.trace.end(ending or refused)
            self.forget(job)
            report(job.session, job.ticket, ending or refused)
            return
        # This worker may have claimed back a ticket that it detached.
        if detached := self.jobs.detached(ticket.holder_id):
            self.forget(detached)
        job.ticket = replace(job.living_ticket, holder_epoch=claim.epoch)
        if job.ending:
            self._leave(job, job.ending)
        else:
            self._run(job, claim)

    def _run(self, job: DecodeJob, claim: Claim) -> None:
        """Give a claimed ticket to the engine, unless the stamps of its blocks do not match its
        tokens: then its blocks are released and it is computed again."""
        worker, ticket = self.worker, job.ticket
        key, epoch = ticket.holder_id, ticket.holder_epoch
        spare, finished = blocks_in_no_table(ticket, claim, worker.stamps)
        group = group_class(ticket).to_continue(
            ticket, worker.rules(ticket), spare, claim.num_acquired
        )
        if not group.is_stamped(worker.stamps):
            log.error("kv_corrupt", holder_id=ticket.holder_id)
            worker.metrics.kv_corrupt.inc()
            self.release(job, STALE)
            return
        job.state = State.RUNNING
        job.trace.enter("decode steps")
        self.running[key] = job
        worker.holders.give_back(ticket, finished)
        self._extender.add(key, epoch, claim.num_acquired)
        self._extender.want(key, group.total_wanted(worker.limits.look_ahead))
        worker.engine.send(messages.Admit(group, is_started=False))
        self.begin(job)

    def on_advances(self, advances: Sequence[Advance]) -> None:
        super().on_advances(advances)
        for session, generated in self._outputs.items():
            session.send(Step(tuple(generated)))
        self._outputs.clear()

    def _on_advance(self, job: DecodeJob, advance: Advance) -> None:
        """Apply what a step did with a group, or the end of the group. The gateway gets the outputs
        of the step unless it has aborted the request."""
        worker = self.worker
        if advance.remaining is not None and advance.remaining.sequences:
            assert job.ending is not None
            job.ticket = job.ticket.with_group(advance.remaining)
            self._leave(job, job.ending)
            return
        ticket = job.ticket  # now: a detach may change the epoch before the commit
        job.trace.note_step(sum(len(one.token_ids) for one in advance.outputs))
        if advance.completed:
            worker.writer.put(lambda: worker.holders.commit(ticket, advance.completed))
        if advance.remaining is None:
            worker.holders.give_back(ticket, advance.freed)
            self._extender.want(advance.key, advance.wanted_blocks)
        else:
            if not job.ending:
                job.trace.end("finished")
            self.release(job, ABORTED)
        if job.ending == ABORTED:
            return
        if outputs := job.take_outputs(advance):
            self._outputs.setdefault(job.session, []).extend(outputs)
        worker.metrics.generation_tokens.inc(sum(len(one.token_ids) for one in outputs))
        for one in advance.outputs:
            if one.num_drafts:
                worker.metrics.num_drafts.inc()
                worker.metrics.num_draft_tokens.inc(one.num_drafts)
                worker.metrics.num_accepted_tokens.inc(one.num_accepted)

    def _drop(self, job: DecodeJob, index: int) -> None:
        """End one of several sequences; its gateway no longer wants it."""
        job.living.remove(index)
        if job.state is State.RUNNING:
            self.worker.engine.send(messages.AbortSequence(job.ticket.holder_id, index))
        elif job.state is State.DETACHED:
            job.ticket = job.living_ticket

    # Early ends.

    def _leave(self, job: DecodeJob, ending: Ending) -> None:
        """Release the blocks of a request that is no longer in the engine, or keep them for the
        worker that claims the ticket, or copy them to the swap pool and release them then."""
        self._stop(job)
        swap_pool = self.worker.swap_pool
        others = (other.ticket for other in self.running.values())
        if ending is HANDED_OVER:
            job.ending = None
            job.ticket = replace(job.ticket, holder_epoch=job.ticket.holder_epoch + 1)
            self._offer(job)
        elif ending is PREEMPTED and swap_pool and swap_pool.is_worthwhile(job.ticket, others):
            job.trace.enter("swap out")
            job.state, job.ending = State.SWAPPING, None
            self.worker.start(self._swap_out(job))
        else:
            self.release(job, ending)

    def _stop(self, job: DecodeJob) -> None:
        if self.running.get(job.ticket.holder_id) is job:
            self._extender.remove(job.ticket.holder_id)
        super()._stop(job)

    def _offer(self, job: DecodeJob) -> None:
        """Detach a ticket and offer it to its gateway. An offer to a new gateway may run beside the
        first one, so it detaches the holder again.

        Blocks that the store grants to the holder at the same time belong to the claiming worker:
        the claim names them.
        """
        self.detach(job, lambda: _requeued(job, RequeueReason.HANDED_OVER), HANDED_OVER)

    async def _swap_out(self, job: DecodeJob) -> None:
        """Copy the KV of a preempted request to the swap pool, after that of earlier ones. No step
        touches its blocks any more; the job keeps them until they are copied."""
        assert self.worker.swap_pool is not None
        async with self._swapping:
            swapped = await self.worker.swap_pool.put(job.ticket)
        if swapped is not None:
            self._keep_swapped(job, swapped)
            return
        log.info("swap_out_refused", holder_id=job.ticket.holder_id)
        self.worker.metrics.num_swaps_refused.inc()
        self.release(job, job.ending or PREEMPTED)

    def _keep_swapped(self, job: DecodeJob, swapped: Swapped) -> None:
        """Keep the ticket of a request that is swapped out, and release its blocks here."""
        worker, ticket, limits = self.worker, job.ticket, self.worker.limits

        async def release() -> None:
            await worker.holders.release(ticket, job.ending or PREEMPTED)
            if not job.ending:
                job.session.send(_requeued(job, RequeueReason.PREEMPTED))

        job.state, job.ticket = State.DETACHED, replace(without_blocks(ticket), swapped=swapped)
        job.trace.end(PREEMPTED)
        worker.writer.put(release)
        if job.ending:
            self.take_back(job, job.ending)
        else:
            ttl_s = limits.ticket_ttl_s if worker.draining else limits.swapped_ttl_s
            self.jobs.end_after(ttl_s, job, STALE)

    def _check(self, ticket: Ticket, num_slots: int) -> None:
        self.worker.check_ticket(ticket)
        check_detached(ticket, self.worker.spec, num_slots)
        claim = ticket.holder_id, ticket.holder_epoch
        if any(job.claim == claim for job in self.jobs):
            raise InvalidRequest("this worker has already claimed this ticket")


def _requeued(job: DecodeJob, reason: RequeueReason) -> Requeued:
    return Requeued(*job.ticket.key, reason, job.ticket)
