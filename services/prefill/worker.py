"""The prefill worker: tickets without blocks in, tickets with blocks and a first token out."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from blockstore.records import PrefixHash
from blockstore.registry import Load
from blockstore.store import BlockStore
from services.common.errors import InvalidRequest
from services.common.runtime.metrics import WorkerMetrics
from services.engine import messages
from services.engine.engine import ForwardPass
from services.engine.messages import Advance, Broken, StepOutcome
from services.engine.sequences.beam_group import kind_of_group
from services.engine.sequences.block_keys import BlockKeys, num_blocks_for
from services.prefill.admission import Admission
from services.prefill.job import Job, State
from services.prefill.prefixes import PrefixesUnderWay
from services.protocol.ticket import BeamState, Ticket, TicketSequence, first_of
from services.worker.events import (
    ABORTED,
    DRAINED,
    EXPIRED,
    PREEMPTED,
    STALE,
    Ending,
    Prefilled,
    Requeued,
    RequeueReason,
    Session,
    found,
    output,
    poisoned,
    report,
)
from services.worker.jobs import Jobs
from services.worker.membership import Membership
from services.worker.pool_worker import Limits, PoolWorker
from services.worker.swap.cost import Pace
from services.worker.swap.pool import Fetched, SwapPool

_STEPS_AHEAD = 2
_LONG_SHARE = 4
"""Blocks are given out for so many steps' worth of tokens, a long prompt counting as a quarter of a
step: enough that the next steps are full and short prompts find room beside long ones, little
enough that requests far from their turn hold nothing."""


class PrefillWorker(PoolWorker):
    """submit -> (wait for blocks) -> compute in chunks -> ticket, or an early end at any point."""

    def __init__(
        self,
        store: BlockStore,
        membership: Membership,
        forward: ForwardPass,
        limits: Limits,
        metrics: WorkerMetrics,
        swap_pool: SwapPool | None = None,
    ) -> None:
        super().__init__(store, membership, forward, limits, metrics, swap_pool, one_token=True)
        self._pace = Pace()
        self._prefixes = PrefixesUnderWay(on_change=lambda: self._admission.wake())
        self._admission = Admission(
            store,
            self.pool_id,
            self.worker_id,
            self.spec.block_size,
            membership.stamps,
            self._prefixes,
            has_room=self._has_room,
            on_admitted=self._begin,
            on_corrupt=metrics.kv_corrupt.inc,
            on_stale=lambda job: self._end(job, STALE),
        )
        self._jobs: Jobs[Job] = Jobs(self._end)
        self._computing: dict[str, Job] = {}
        self._issued: dict[str, Job] = {}
        self._fetching: asyncio.Queue[Job] = asyncio.Queue()

    # What gateways ask.

    def submit(
        self,
        session: Session,
        ticket: Ticket,
        num_prompt_logprobs: int | None = None,
        *,
        suspect: bool = False,
    ) -> None:
        """Take a ticket without blocks; tell the logprobs of its prompt, unless None. Raises
        InvalidRequest."""
        if self.draining:
            session.send(Requeued(ticket, RequeueReason.DRAINING))
            return
        self._check(ticket)
        if self._jobs.get(session, *ticket.key):
            raise InvalidRequest(f"attempt {ticket.attempt} of this request is here already")
        contents = BlockKeys.of(ticket, self.spec.block_size)
        job = Job(session, ticket, contents, suspect, num_prompt_logprobs=num_prompt_logprobs)
        self._jobs.add(job)
        if ticket.timeout_ms:
            self._jobs.end_after(ticket.timeout_ms / 1000, job, EXPIRED)
        self._admission.add(job)

    def abort(
        self, session: Session, request_id: str, attempt: int, index: int | None = None
    ) -> None:
        """End a request. One of several sequences ends where its gateway leaves it out of the
        ticket that it sends on: each draws one token here, whoever wants it."""
        job = self._jobs.get(session, request_id, attempt)
        if job and (index is None or job.ticket.is_only(index)):
            self._end(job, ABORTED)

    def close(self, session: Session) -> None:
        """The gateway is gone: everything that came from it ends."""
        for job in self._jobs.of(session):
            self._end(job, ABORTED)

    def _on_drain(self) -> int:
        for job in self._jobs:
            if job.state is State.WAITING:
                self._end(job, DRAINED)
        return len(self._jobs)

    def give_back(self) -> None:
        for job in self._jobs:
            self._end(job, DRAINED)

    @property
    def num_busy(self) -> int:
        return len(self._computing)

    def load(self) -> Load:
        return Load(
            num_running=len(self._computing),
            num_waiting=len(self._admission),
            num_pending_tokens=self._admission.num_tokens
            + sum(job.num_uncomputed for job in self._computing.values()),
        )

    # The walk of a job: WAITING -> (FETCHING) -> COMPUTING -> ISSUED -> ENDED.

    def _has_room(self) -> bool:
        budget = self.limits.max_num_batched_tokens
        longest = max(1, budget // _LONG_SHARE)
        ahead = sum(min(job.num_uncomputed, longest) for job in self._computing.values())
        return ahead < _STEPS_AHEAD * budget and len(self._computing) < self.limits.max_num_seqs

    def _begin(self, job: Job) -> None:
        """It has its blocks, and perhaps KV in the colder pool."""
        assert job.allocation is not None
        self._computing[job.ticket.holder_id] = job
        self._prefixes.begin(job.ticket.holder_id, job.hashes[job.allocation.num_cached_blocks :])
        is_all_computed = job.num_prompt_logprobs is not None
        if self.swap_pool is None or is_all_computed or not self.swap_pool.holds(job.ticket):
            self._compute(job, Fetched(job.begun()))
            return
        job.state = State.FETCHING
        job.num_uncomputed = len(job.ticket.sequences)
        self._fetching.put_nowait(job)

    async def _fetch_all(self) -> None:
        """Bring back what was swapped out, one after another."""
        assert self.swap_pool is not None
        while True:
            job = await self._fetching.get()
            assert job.allocation is not None
            fetched = await self.swap_pool.fetch(job.ticket, job.allocation, job.contents)
            if job.ending:
                self._retire(job)
            else:
                self._compute(job, fetched)

    def _compute(self, job: Job, fetched: Fetched) -> None:
        """The engine does the rest:

        blocks   |== adopted ==|== copied ==|------- new -------|
        tokens   |====== computed ======|---- to compute ----|  never empty: the last token draws

        So for each sequence of a group; what those have in common that have the same blocks is
        computed once, and what each has behind that after it.

        Whose prompt's logprobs are asked for computes all of it, in adopted blocks without storing
        anything there.
        """
        allocation = job.allocation
        assert allocation is not None
        new = allocation.block_ids[allocation.num_cached_blocks + fetched.num_blocks :]
        rules = self.rules(job.ticket, job.num_prompt_logprobs)
        group = kind_of_group(job.ticket).to_compute(
            job.ticket, rules, new, fetched.begun, job.hashes
        )
        job.state = State.COMPUTING
        job.num_uncomputed = group.num_uncomputed
        num_computed = max(0, job.num_tokens - group.num_uncomputed)
        if not any(sequence.token_ids for sequence in job.ticket.sequences):
            job.ticket = replace(job.ticket, num_cached_tokens=num_computed)
        self.metrics.prompt_tokens.inc(job.num_uncomputed)
        self.metrics.prompt_tokens_cached.inc(num_computed)
        if fetched.completed:
            self.writer.put(lambda: self._commit(job, fetched.completed))
        self.engine.send(messages.Admit(group, is_started=False))
        self.begin(group.key, job.session, job.ticket.key, suspect=job.suspect)

    def _on_outcome(self, outcome: StepOutcome) -> None:
        self._pace.observe(outcome.num_tokens, outcome.duration_s)
        for advance in outcome.advances:
            self._on_advance(self._computing[advance.key], advance)
        for broken in outcome.broken:
            self._break(self._computing[broken.key], broken)
        for removed in outcome.removed:
            self._retire(self._computing[removed.key])
        self._admission.wake()

    def _on_advance(self, job: Job, advance: Advance) -> None:
        job.num_uncomputed = advance.num_uncomputed
        job.outputs += (output(job.ticket, token) for token in advance.tokens)
        job.prompt_logprobs += advance.prompt_logprobs
        job.outputs += found(job.ticket, advance.found)
        if advance.completed:
            self.writer.put(lambda: self._commit(job, advance.completed))
        if advance.left is None:
            self._give_back(job, advance.freed)
        elif job.ending:
            self._retire(job)
        else:
            self.metrics.generation_tokens.inc(len(job.outputs))
            if advance.left:
                self._give_back(job, advance.freed)
                self._issue(job, advance.left, advance.beams)
            else:
                self._finish(job)

    def _give_back(self, job: Job, block_ids: Sequence[int]) -> None:
        """What those that have ended already leave."""
        if block_ids:
            held = self.pool_id, job.ticket.holder_id, _epoch(job)
            self.writer.put(lambda: self.store.give_back(*held, block_ids))

    async def _commit(self, job: Job, completed: Sequence[tuple[int, PrefixHash]]) -> None:
        holder_id, epoch = job.ticket.holder_id, _epoch(job)
        await self.store.commit(self.pool_id, holder_id, epoch, completed)
        self._prefixes.end(holder_id, [prefix_hash for _, prefix_hash in completed])

    def _issue(self, job: Job, left: tuple[TicketSequence, ...], beams: BeamState | None) -> None:
        """At rest: nobody writes its blocks until somebody claims them."""
        ticket = job.issued(left, beams, self._pace.ns_per_token)

        async def detach() -> None:
            await self.store.detach(self.pool_id, ticket.holder_id, ticket.holder_epoch - 1)
            if not job.ending:
                told = tuple(job.outputs), tuple(job.prompt_logprobs)
                job.session.send(Prefilled(ticket, *told))
                self.suspects.leave(ticket.holder_id)

        job.state = State.ISSUED
        job.ticket = ticket
        self._issued[ticket.holder_id] = self._computing.pop(ticket.holder_id)
        self._jobs.end_after(self.limits.ticket_ttl_s, job, STALE)
        self.writer.put(detach)

    def _finish(self, job: Job) -> None:
        holder_id, epoch = job.ticket.holder_id, _epoch(job)

        async def release() -> None:
            await self.store.release(self.pool_id, holder_id, epoch)
            told = tuple(job.outputs), tuple(job.prompt_logprobs)
            job.session.send(Prefilled(job.finished(), *told))
            self.suspects.leave(holder_id)

        self._forget(job)
        self.writer.put(release)

    # Early ends.

    def _break(self, job: Job, broken: Broken) -> None:
        """The engine has dropped it; the others of its step went on."""
        self.distrust(broken)
        job.ending = job.ending or poisoned(broken.fault)
        self._retire(job)

    def _end(self, job: Job, ending: Ending) -> None:
        if job.ending:
            return
        job.ending = ending
        if job.state is State.WAITING:
            self._admission.remove(job)
            holder_id = job.ticket.holder_id
            self.writer.put(lambda: self.store.withdraw(self.pool_id, holder_id))
            self._forget(job)
            report(job.session, job.ticket, ending)
        elif job.state is State.COMPUTING:
            self.suspects.withdraw(job.ticket.holder_id)
            self.engine.send(messages.Remove(job.ticket.holder_id))
        elif job.state is State.ISSUED:
            self.writer.put(lambda: self._take_back(job, ending))

    def _retire(self, job: Job) -> None:
        """The engine has let go of a job that ends early; its commits are written before this."""
        ticket, ending = replace(job.ticket, holder_epoch=_epoch(job)), job.ending
        assert ending is not None

        async def release() -> None:
            await self.release(ticket, ending)
            report(job.session, ticket, ending)
            self.suspects.leave(ticket.holder_id)

        self._forget(job)
        self.writer.put(release)

    async def _take_back(self, job: Job, ending: Ending) -> None:
        await self.take_back(job.session, job.ticket, ending)
        self.suspects.leave(job.ticket.holder_id)
        self._forget(job)

    def _forget(self, job: Job) -> None:
        job.state = State.ENDED
        self._jobs.remove(job)
        self._computing.pop(job.ticket.holder_id, None)
        self._issued.pop(job.ticket.holder_id, None)
        self._prefixes.end(job.ticket.holder_id, job.hashes)

    # The pool's demands.

    def _on_demands(self, holder_ids: Sequence[str]) -> None:
        for holder_id in holder_ids:
            job = self._computing.get(holder_id) or self._issued.get(holder_id)
            if job and not job.ending:
                self.metrics.num_preemptions.inc()
                self._end(job, PREEMPTED)

    def _loops(self) -> Sequence[Coroutine[Any, Any, None]]:
        loops = [self._admission.run()]
        return loops if self.swap_pool is None else [*loops, self._fetch_all()]

    def _check(self, ticket: Ticket) -> None:
        if ticket.pool_id != self.pool_id:
            raise InvalidRequest(f"this worker is on pool {self.pool_id}, not {ticket.pool_id}")
        if any(sequence.block_ids for sequence in ticket.sequences):
            raise InvalidRequest("a ticket for prefill has no blocks")
        self.check_tokens(ticket)
        if any(first_of(job.ticket.holder_id) == ticket.holder_id for job in self._jobs):
            raise InvalidRequest("another request here has this holder")
        num_blocks = num_blocks_for(ticket, self.spec.block_size)
        if num_blocks > self.spec.num_blocks:
            raise InvalidRequest(
                f"{len(ticket.sequences)} sequences need {num_blocks} blocks at once,"
                f" the pool has {self.spec.num_blocks}"
            )


def _epoch(job: Job) -> int:
    assert job.allocation is not None
    return job.allocation.epoch
