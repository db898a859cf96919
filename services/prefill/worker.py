"""The prefill worker: takes tickets without blocks, returns them with blocks and first tokens."""

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

from blockstore.records import PrefixHash
from blockstore.registry import Load
from services.common.errors import InvalidRequest
from services.engine import messages
from services.engine.messages import Advance, StepOutcome
from services.engine.sequences.beam_group import group_class
from services.prefill.admission import Admission
from services.prefill.job import Job, State
from services.protocol.block_keys import BlockKeys, num_blocks_for
from services.protocol.messages import Command, Submit
from services.protocol.ticket import BeamState, Ticket, TicketSequence, first_holder_id
from services.worker.pool_worker import PoolWorker, WorkerParts
from services.worker.requests.events import (
    ABORTED,
    DRAINED,
    EXPIRED,
    STALE,
    Ending,
    Session,
    embedding_event,
    hypothesis_events,
    poisoned,
    report,
    token_events,
)
from services.worker.requests.jobs import Jobs
from services.worker.swap.cost import PrefillCost
from services.worker.swap.pool import Fetched

_STEPS_AHEAD = 2
_LONG_SHARE = 4
"""Requests get blocks until the engine has `_STEPS_AHEAD` full steps of tokens to compute; a prompt
counts for at most 1 / `_LONG_SHARE` of a step. So the next steps are full, short prompts run beside
long ones, and requests that are far from their turn hold no blocks."""


class PrefillWorker(PoolWorker):
    """Takes a request from its ticket without blocks to its ticket with blocks.

        submit -> wait for blocks -> compute in chunks -> issue the ticket

    A request may end early at any point.
    """

    def __init__(self, parts: WorkerParts) -> None:
        super().__init__(parts, one_token=True)
        self._prefill_cost = PrefillCost()
        self._admission = Admission(
            self,
            has_room=self._has_room,
            on_admitted=self._begin,
            on_stale=lambda job: self._end(job, STALE),
        )
        self._jobs: Jobs[Job] = Jobs(self._end)
        self._computing: dict[str, Job] = {}
        self._issued: dict[str, Job] = {}
        self._fetching: asyncio.Queue[Job] = asyncio.Queue()

    # Commands of gateways.

    def execute(self, session: Session, command: Command) -> None:
        match command:
            case Submit(ticket, prompt_logprobs, suspect):
                self.submit(session, ticket, prompt_logprobs, suspect=suspect)
            case _:
                super().execute(session, command)

    def submit(
        self,
        session: Session,
        ticket: Ticket,
        num_prompt_logprobs: int | None = None,
        *,
        suspect: bool = False,
    ) -> None:
        """Queue a ticket without blocks; a draining worker sends it back. Raises InvalidRequest.
        `num_prompt_logprobs`, `suspect`: see `Job`."""
        if self.draining:
            report(session, ticket, DRAINED)
            return
        self._check(ticket)
        if self._jobs.get(session, *ticket.key):
            raise InvalidRequest(f"attempt {ticket.attempt} of this request is here already")
        block_keys = BlockKeys.of(ticket, self.spec.block_size)
        job = Job(session, ticket, block_keys, suspect, num_prompt_logprobs=num_prompt_logprobs)
        job.trace = self.trace_of(ticket, "prefill worker")
        job.trace.enter("queue")
        self._jobs.add(job)
        if ticket.timeout_ms:
            self._jobs.end_after(ticket.timeout_ms / 1000, job, EXPIRED)
        job.state = State.LOADING
        self.with_adapter(job, ticket, lambda: self._await_blocks(job))

    def _await_blocks(self, job: Job) -> None:
        if not job.ending:
            job.state = State.WAITING
            self._admission.add(job)

    def abort(
        self, session: Session, request_id: str, attempt: int, index: int | None = None
    ) -> None:
        """End a request. No error if it is not here.

        `index`: an abort of one of several sequences has no effect, because each of them draws only
        one token here. The gateway leaves the aborted sequence out of the ticket that it sends on.
        """
        job = self._jobs.get(session, request_id, attempt)
        if job and (index is None or job.ticket.is_only(index)):
            self._end(job, ABORTED)

    def close(self, session: Session) -> None:
        """End all requests of a gateway that is gone."""
        for job in self._jobs.of(session):
            self._end(job, ABORTED)

    def _on_drain(self) -> int:
        for job in self._jobs:
            if job.state in (State.LOADING, State.WAITING):
                self._end(job, DRAINED)
        return len(self._jobs)

    @property
    def num_busy(self) -> int:
        return len(self._computing)

    def load(self) -> Load:
        return Load(
            num_running=len(self._computing),
            num_waiting=len(self._admission),
            num_pending_tokens=self._admission.num_tokens
            + sum(job.num_uncomputed for job in self._computing.values()),
            **self.step_meter.figures(),
        )

    # States of a job: LOADING -> WAITING -> (FETCHING) -> COMPUTING -> ISSUED -> ENDED.

    def _has_room(self) -> bool:
        budget = self.limits.max_num_batched_tokens
        longest = max(1, budget // _LONG_SHARE)
        ahead = sum(min(job.num_uncomputed, longest) for job in self._computing.values())
        return ahead < _STEPS_AHEAD * budget and len(self._computing) < self.limits.max_num_seqs

    def _begin(self, job: Job) -> None:
        """Compute a job that has its blocks, or first copy its KV back from the swap pool.

        KV in the swap pool is of no use to a request that computes all of its prompt.
        """
        assert job.allocation is not None
        job.ticket = replace(job.ticket, holder_epoch=job.allocation.epoch)
        self._computing[job.ticket.holder_id] = job
        self._admission.prefixes.begin(
            job.ticket.holder_id, job.hashes[job.allocation.num_cached_blocks :]
        )
        if self.swap_pool is None or job.computes_all or not self.swap_pool.holds(job.ticket):
            self._compute(job, Fetched(job.computed_blocks()))
            return
        job.state = State.FETCHING
        job.trace.enter("fetch")
        job.num_uncomputed = len(job.ticket.sequences)
        self._fetching.put_nowait(job)

    async def _fetch_swapped(self) -> None:
        """Copy swapped-out KV back, one request at a time."""
        assert self.swap_pool is not None
        while True:
            job = await self._fetching.get()
            assert job.allocation is not None
            fetched = await self.swap_pool.fetch(job.ticket, job.allocation, job.block_keys)
            if job.ending:
                self._retire(job)
            else:
                self._compute(job, fetched)

    def _compute(self, job: Job, fetched: Fetched) -> None:
        """Give the engine the tokens that no block has KV for yet:

        blocks   |== adopted ==|== copied ==|------- new -------|
        tokens   |====== computed ======|---- to compute ----|  never empty: the last token draws

        This holds for each sequence of a group. Tokens that several sequences begin with are
        computed once, if the sequences have the same blocks before them; then the rest of each.

        A request that asks for logprobs of its prompt, or for their mean state, computes all of the
        prompt, but stores no KV in adopted blocks.
        """
        allocation = job.allocation
        assert allocation is not None
        new = allocation.block_ids[allocation.num_cached_blocks + fetched.num_blocks :]
        rules = self.rules(job.ticket, job.num_prompt_logprobs)
        group = group_class(job.ticket).to_compute(
            job.ticket, rules, new, fetched.computed, job.hashes
        )
        job.state = State.COMPUTING
        job.num_uncomputed = group.num_uncomputed
        num_computed = max(0, job.num_tokens - group.num_uncomputed)
        if not any(sequence.token_ids for sequence in job.ticket.sequences):
            job.ticket = replace(job.ticket, num_cached_tokens=num_computed)
        self.metrics.prompt_tokens.inc(job.num_uncomputed)
        self.metrics.prompt_tokens_cached.inc(num_computed)
        tokens = {"num_uncomputed": job.num_uncomputed, "num_cached_tokens": num_computed}
        job.trace.enter("compute", {f"quire.{name}": value for name, value in tokens.items()})
        self._commit(job.ticket, fetched.completed)
        self.engine.send(messages.Admit(group, is_started=False))
        self.begin(job.ticket, job.session, suspect=job.suspect)

    def _on_outcome(self, outcome: StepOutcome) -> None:
        self._prefill_cost.observe(outcome.num_tokens, outcome.duration_s)
        for advance in outcome.advances:
            self._on_advance(self._computing[advance.key], advance)
        for failed in outcome.failed:
            self.retract(failed)
            job = self._computing[failed.key]
            job.ending = job.ending or poisoned(failed.fault)
            self._retire(job)
        for removed in outcome.removed:
            self._retire(self._computing[removed.key])
        self._admission.wake()

    def _on_advance(self, job: Job, advance: Advance) -> None:
        job.num_uncomputed = advance.num_uncomputed
        job.trace.note_step(len(advance.tokens))
        job.outputs += token_events(job.ticket, advance.tokens)
        job.prompt_logprobs += advance.prompt_logprobs
        job.outputs += hypothesis_events(job.ticket, advance.hypotheses)
        if advance.embedding:
            job.outputs.append(embedding_event(job.ticket, advance.embedding))
        self._commit(job.ticket, advance.completed)
        if advance.remaining is None:
            self.holders.give_back(job.ticket, advance.freed)
        elif job.ending:
            self._retire(job)
        else:
            self.metrics.generation_tokens.inc(0 if advance.embedding else len(job.outputs))
            if advance.remaining:
                self.holders.give_back(job.ticket, advance.freed)
                self._issue(job, advance.remaining, advance.beams)
            else:
                self._finish(job)

    def _commit(self, ticket: Ticket, completed: Sequence[tuple[int, PrefixHash]]) -> None:
        async def commit() -> None:
            await self.holders.commit(ticket, completed)
            self._admission.prefixes.end(
                ticket.holder_id, [prefix_hash for _, prefix_hash in completed]
            )

        if completed:
            self.writer.put(commit)

    def _issue(
        self, job: Job, remaining: tuple[TicketSequence, ...], beams: BeamState | None
    ) -> None:
        """Detach the holder and send its ticket. No worker writes the blocks before the claim."""
        ticket = replace(
            job.ticket,
            holder_epoch=job.ticket.holder_epoch + 1,
            sequences=remaining,
            swapped=None,
            beams=beams,
            prefill_ns_per_token=self._prefill_cost.ns_per_token,
        )

        async def detach() -> None:
            job.trace.enter("store detach")
            await self.store.detach(self.pool_id, ticket.holder_id, ticket.holder_epoch - 1)
            job.trace.end("issued")
            if not job.ending:
                job.session.send(job.prefilled(ticket))
                self.suspects.leave(ticket.holder_id)

        job.state = State.ISSUED
        job.ticket = ticket
        self._issued[ticket.holder_id] = self._computing.pop(ticket.holder_id)
        self._jobs.end_after(self.limits.ticket_ttl_s, job, STALE)
        self.writer.put(detach)

    def _finish(self, job: Job) -> None:
        ticket = job.ticket

        async def release() -> None:
            await self.store.release(self.pool_id, ticket.holder_id, ticket.holder_epoch)
            finished = replace(ticket, holder_epoch=0, sequences=(), swapped=None, beams=None)
            job.session.send(job.prefilled(finished))
            self.suspects.leave(ticket.holder_id)

        self._forget(job)
        self.writer.put(release)

    # Early ends.

    def _end(self, job: Job, ending: Ending) -> None:
        if job.ending:
            return
        job.ending = ending
        if job.state is State.LOADING:
            self._forget(job)
            report(job.session, job.ticket, ending)
        elif job.state is State.WAITING:
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
        """Release the blocks of a job that ends early and is no longer in the engine."""
        assert job.ending is not None
        self._forget(job)
        self.holders.end(job.session, job.ticket, job.ending)

    async def _take_back(self, job: Job, ending: Ending) -> None:
        await self.holders.release_detached(job.session, job.ticket, ending)
        self.suspects.leave(job.ticket.holder_id)
        self._forget(job)

    def _forget(self, job: Job) -> None:
        job.state = State.ENDED
        job.trace.end(job.ending or "finished")
        self._jobs.remove(job)
        self._computing.pop(job.ticket.holder_id, None)
        self._issued.pop(job.ticket.holder_id, None)
        self._admission.prefixes.end(job.ticket.holder_id, job.hashes)

    def _job_of(self, holder_id: str) -> Job | None:
        return self._computing.get(holder_id) or self._issued.get(holder_id)

    def _loops(self) -> Sequence[Coroutine[Any, Any, None]]:
        loops = [self._admission.run()]
        return loops if self.swap_pool is None else [*loops, self._fetch_swapped()]

    def _check(self, ticket: Ticket) -> None:
        if ticket.pool_id != self.pool_id:
            raise InvalidRequest(f"this worker is on pool {self.pool_id}, not {ticket.pool_id}")
        if any(sequence.block_ids for sequence in ticket.sequences):
            raise InvalidRequest("a ticket for prefill has no blocks")
        self.check_tokens(ticket)
        if any(first_holder_id(job.ticket.holder_id) == ticket.holder_id for job in self._jobs):
            raise InvalidRequest("another request here has this holder")
        num_blocks = num_blocks_for(ticket, self.spec.block_size)
        if num_blocks > self.spec.num_blocks:
            raise InvalidRequest(
                f"{len(ticket.sequences)} sequences need {num_blocks} blocks at once,"
                f" the pool has {self.spec.num_blocks}"
            )
