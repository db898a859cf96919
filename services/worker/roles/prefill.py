"""The prefill role: takes tickets without blocks, returns them with blocks and first tokens."""

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from blockstore.records import PrefixHash
from blockstore.registry import Load
from services.engine import messages
from services.engine.sequences.beam_group import group_class
from services.engine.sequences.results import Advance
from services.protocol.block_keys import BlockKeys, num_blocks_for
from services.protocol.messages import Command, Pooling, Submit
from services.protocol.ticket import GroupState, Ticket, first_holder_id
from services.protocol.worker_stream import PREFILL
from services.runtime.errors import InvalidRequest
from services.worker.file_cache.file_cache import FileCache
from services.worker.pool_engine import PoolEngine
from services.worker.requests.events import (
    ABORTED,
    DRAINED,
    STALE,
    Ending,
    Session,
    report,
)
from services.worker.requests.jobs import State
from services.worker.roles.admission import Admission
from services.worker.roles.prefill_job import PrefillJob
from services.worker.roles.role import Role
from services.worker.swap.pool import Fetched, SwapPool

_STEPS_AHEAD = 2
_LONG_SHARE = 4
"""Requests get blocks until the engine has `_STEPS_AHEAD` full steps of tokens to compute; a prompt
counts for at most 1 / `_LONG_SHARE` of a step. So the next steps are full, short prompts run beside
long ones, and requests that are far from their turn hold no blocks."""


class Prefill(Role[PrefillJob]):
    """Takes a request from its ticket without blocks to its ticket with blocks.

        submit -> wait for blocks -> compute in chunks -> detach the ticket

    A request may end early at any point.
    """

    stream = PREFILL
    one_token: ClassVar[bool] = True
    """Whether a sequence stops after its first drawn token: another role continues it."""

    def __init__(self, worker: PoolEngine) -> None:
        super().__init__(worker)
        self._admission = Admission(
            worker,
            has_room=self._has_room,
            on_admitted=self._begin,
            on_stale=lambda job: self.end(job, STALE),
        )
        self._fetching = asyncio.Lock()

    # Commands of gateways.

    def execute(self, session: Session, command: Command) -> None:
        match command:
            case Submit(ticket, prompt_logprobs, pooling):
                self.submit(session, ticket, prompt_logprobs, pooling)
            case _:
                super().execute(session, command)

    def submit(
        self,
        session: Session,
        ticket: Ticket,
        num_prompt_logprobs: int | None = None,
        pooling: Pooling | None = None,
    ) -> None:
        """Queue a ticket without blocks; a draining worker sends it back. Raises InvalidRequest."""
        if self.worker.draining:
            report(session, ticket, DRAINED)
            return
        self._check(ticket, 1 if pooling is None else 0)
        if self.jobs.get(session, *ticket.key):
            raise InvalidRequest(f"attempt {ticket.attempt} of this request is here already")
        job = PrefillJob(
            session,
            ticket,
            block_keys=BlockKeys.of(ticket, self.worker.spec.block_size),
            num_prompt_logprobs=num_prompt_logprobs,
            pooling=pooling,
        )
        self.jobs.add(job)
        self.accept(job, "prefill worker", "queue", lambda: self._await_blocks(job))

    def _await_blocks(self, job: PrefillJob) -> None:
        if not job.ending:
            job.state = State.WAITING
            self._admission.add(job)

    def abort(
        self, session: Session, request_id: str, attempt: int, index: int | None = None
    ) -> None:
        """End a request. No error if it is not here.

        An abort of one of several sequences, with `index`, has no effect, because each of them
        draws only one token here. The gateway leaves the aborted sequence out of the ticket that it
        sends on.
        """
        job = self.jobs.get(session, request_id, attempt)
        if job and (index is None or job.ticket.is_only(index)):
            self.end(job, ABORTED)

    def close(self, session: Session) -> None:
        """End all requests of a gateway that is gone."""
        for job in self.jobs.of(session):
            self.end(job, ABORTED)

    def on_drain(self) -> None:
        for job in self.jobs:
            if job.state in (State.LOADING, State.WAITING):
                self.end(job, DRAINED)

    def load(self) -> Load:
        return Load(
            num_running=len(self.running),
            num_waiting=len(self._admission),
            num_pending_tokens=self._admission.num_tokens
            + sum(job.num_uncomputed for job in self.running.values()),
        )

    def loops(self) -> Iterable[Coroutine[Any, Any, None]]:
        return [self._admission.run()]

    # States of a job: LOADING -> WAITING -> (FETCHING) -> RUNNING -> DETACHED -> ENDED.

    def _has_room(self) -> bool:
        limits = self.worker.limits
        longest = max(1, limits.max_num_batched_tokens // _LONG_SHARE)
        ahead = sum(min(job.num_uncomputed, longest) for job in self.running.values())
        is_full = ahead >= _STEPS_AHEAD * limits.max_num_batched_tokens
        return not is_full and len(self.running) < limits.max_num_seqs

    def _begin(self, job: PrefillJob) -> None:
        """Compute a job that has its blocks, or first copy its KV back from the swap pool or from
        files, which is of no use to a request that computes all of its prompt."""
        assert job.allocation is not None
        swap_pool, files = self.worker.swap_pool, self.worker.files
        job.ticket = replace(job.ticket, holder_epoch=job.allocation.epoch)
        self.running[job.ticket.holder_id] = job
        self._admission.prefixes.begin(
            job.ticket.holder_id, job.hashes[job.allocation.num_cached_blocks :]
        )
        if files is not None and not any(state.token_ids for state in job.ticket.sequences):
            job.to_keep = files.asked(job.hashes)
        source: SwapPool | FileCache | None = None
        if swap_pool is not None and swap_pool.holds(job.ticket):
            source = swap_pool
        elif files is not None and files.helps(
            job.allocation, job.block_keys, self.worker.prompt_meter.ns_per_token
        ):
            source = files
        if source is None or job.computes_all:
            self._compute(job, Fetched(job.computed_blocks()))
            return
        job.state = State.FETCHING
        job.trace.enter("fetch")
        job.num_uncomputed = len(job.ticket.sequences)
        self.worker.start(self._fetch(job, source))

    async def _fetch(self, job: PrefillJob, source: SwapPool | FileCache) -> None:
        """Copy KV back from the swap pool or from files, after that of earlier requests."""
        assert job.allocation is not None
        async with self._fetching:
            fetched = await source.fetch(job.ticket, job.allocation, job.block_keys)
        if job.ending:
            self.release(job, job.ending)
        else:
            self._compute(job, fetched)

    def _compute(self, job: PrefillJob, fetched: Fetched) -> None:
        """Give the engine the tokens that no block has KV for yet:

        blocks   |== adopted ==|== copied ==|------- new -------|
        tokens   |====== computed ======|---- to compute ----|  never empty: the last token draws

        This holds for each sequence of a group. Tokens that several sequences begin with are
        computed once, if the sequences have the same blocks before them; then the rest of each.

        A request that asks for logprobs of its prompt, or for their mean state, computes all of the
        prompt, but stores no KV in adopted blocks.
        """
        worker, allocation = self.worker, job.allocation
        assert allocation is not None
        new = allocation.block_ids[allocation.num_cached_blocks + fetched.num_blocks :]
        rules = worker.rules(job.ticket, job.num_prompt_logprobs, job.pooling)
        group = group_class(job.ticket).to_compute(
            job.ticket, rules, new, fetched.computed, job.hashes
        )
        if self.one_token:
            group.stop_after_draws()
        job.state = State.RUNNING
        job.num_uncomputed = group.num_uncomputed
        num_computed = max(0, job.num_tokens - group.num_uncomputed)
        if not any(sequence.token_ids for sequence in job.ticket.sequences):
            job.ticket = replace(job.ticket, num_cached_tokens=num_computed)
        worker.metrics.prompt_tokens.inc(job.num_uncomputed)
        worker.metrics.prompt_tokens_cached.inc(num_computed)
        tokens = {"num_uncomputed": job.num_uncomputed, "num_cached_tokens": num_computed}
        job.trace.enter("compute", {f"quire.{name}": value for name, value in tokens.items()})
        if worker.files is not None:
            adopted = allocation.cached(*job.chains)
            worker.files.keep(((adopted[key], key) for key in adopted), job.to_keep)
        self._commit(job, fetched.completed)
        worker.engine.send(messages.Admit(group, is_started=False))
        self.begin(job)

    def on_advances(self, advances: Sequence[Advance]) -> None:
        super().on_advances(advances)
        self._admission.wake()

    def _on_advance(self, job: PrefillJob, advance: Advance) -> None:
        job.num_uncomputed = advance.num_uncomputed
        job.trace.note_step(len(advance.outputs))
        job.outputs += advance.outputs
        job.prompt_logprobs += advance.prompt_logprobs
        job.embedding = advance.embedding
        self._commit(job, advance.completed)
        if advance.remaining is None:
            self.worker.holders.give_back(job.ticket, advance.freed)
        elif job.ending:
            self.release(job, job.ending)
        else:
            self.worker.metrics.generation_tokens.inc(len(job.outputs))
            if advance.remaining.sequences:
                self.worker.holders.give_back(job.ticket, advance.freed)
            self._finish(job, advance.remaining)

    def _commit(self, job: PrefillJob, completed: Sequence[tuple[int, PrefixHash]]) -> None:
        ticket = job.ticket

        async def commit() -> None:
            await self.worker.holders.commit(ticket, completed)
            self._admission.prefixes.end(
                ticket.holder_id, [prefix_hash for _, prefix_hash in completed]
            )

        if completed:
            self.worker.writer.put(commit)
        if self.worker.files is not None:
            self.worker.files.keep(completed, job.to_keep)

    def _finish(self, job: PrefillJob, left: GroupState) -> None:
        """Detach the sequences that continue and send their ticket, or release the blocks if none
        continues."""
        worker, ticket = self.worker, job.ticket
        job.ticket = replace(
            ticket.with_group(left),
            holder_epoch=ticket.holder_epoch + 1 if left.sequences else 0,
            swapped=None,
            prefill_ns_per_token=worker.prompt_meter.ns_per_token,
        )
        if left.sequences:
            self.detach(job, job.prefilled, "issued")
            return

        async def release() -> None:
            await worker.store.release(worker.pool_id, ticket.holder_id, ticket.holder_epoch)
            job.session.send(job.prefilled())

        self.forget(job)
        worker.writer.put(release)

    # Early ends.

    def end(self, job: PrefillJob, ending: Ending) -> None:
        super().end(job, ending)
        if job.state is State.WAITING:
            self._admission.remove(job)
            worker, holder_id = self.worker, job.ticket.holder_id
            worker.writer.put(lambda: worker.store.withdraw(worker.pool_id, holder_id))
        if job.state in (State.LOADING, State.WAITING):
            self.forget(job)
            report(job.session, job.ticket, ending)

    def forget(self, job: PrefillJob) -> None:
        super().forget(job)
        self._admission.prefixes.end(job.ticket.holder_id, job.hashes)

    def _check(self, ticket: Ticket, num_drawn: int) -> None:
        if any(sequence.block_ids for sequence in ticket.sequences):
            raise InvalidRequest("a ticket for prefill has no blocks")
        self.worker.check_ticket(ticket, num_drawn)
        if any(first_holder_id(job.ticket.holder_id) == ticket.holder_id for job in self.jobs):
            raise InvalidRequest("another request here has this holder")
        num_blocks = num_blocks_for(ticket, self.worker.spec.block_size)
        if num_blocks > self.worker.spec.num_blocks:
            raise InvalidRequest(
                f"{len(ticket.sequences)} sequences need {num_blocks} blocks at once,"
                f" the pool has {self.worker.spec.num_blocks}"
            )
