"""The role of an offline worker: it prefills a request, and decodes it in the same engine."""

from collections.abc import Coroutine, Iterable
from itertools import chain
from typing import Any

from services.engine.messages import AbortSequence
from services.engine.sequences.results import Advance
from services.worker.pool_engine import PoolEngine
from services.worker.requests.events import ABORTED, Session
from services.worker.requests.jobs import State
from services.worker.roles.block_extender import BlockExtender
from services.worker.roles.prefill import Prefill
from services.worker.roles.prefill_job import PrefillJob
from services.worker.swap.pool import Fetched


class Whole(Prefill):
    """Takes a request from its ticket without blocks to its end.

        submit -> wait for blocks -> compute in chunks -> one token of each sequence a step -> end

    A preempted request is requeued, and can be submitted again with its tokens. `Prefilled` reports
    every step of a request, not only the first.
    """

    one_token = False

    def __init__(self, worker: PoolEngine) -> None:
        super().__init__(worker)
        self._extender = BlockExtender(worker, self.preempt)

    def abort(
        self, session: Session, request_id: str, attempt: int, index: int | None = None
    ) -> None:
        """End a request, or one of its sequences. No error if it is not here."""
        job = self.jobs.get(session, request_id, attempt)
        if index is None or job is None or job.state is not State.RUNNING:
            super().abort(session, request_id, attempt, index)
        else:
            self.worker.engine.send(AbortSequence(job.ticket.holder_id, index))

    def loops(self) -> Iterable[Coroutine[Any, Any, None]]:
        return chain(super().loops(), [self._extender.run()])

    def _has_room(self) -> bool:
        """Nothing is admitted while a running sequence waits for a block: a preempted request would
        take the blocks that it has just given back, and be preempted again."""
        num_running = sum(job.ticket.width for job in self.running.values())
        has_slots = num_running < self.worker.limits.max_num_seqs
        return super()._has_room() and has_slots and not self._extender.is_short

    def _compute(self, job: PrefillJob, fetched: Fetched) -> None:
        assert job.allocation is not None
        holder = job.ticket.holder_id, job.ticket.holder_epoch
        self._extender.add(*holder, len(job.allocation.block_ids))
        super()._compute(job, fetched)

    def _on_advance(self, job: PrefillJob, advance: Advance) -> None:
        job.num_uncomputed = advance.num_uncomputed
        job.prompt_logprobs += advance.prompt_logprobs
        job.outputs = advance.outputs
        job.embedding = advance.embedding
        if (job.outputs or job.embedding) and job.ending is not ABORTED:
            job.session.send(job.prefilled())
            job.prompt_logprobs.clear()
        self._commit(job, advance.completed)
        if advance.remaining is not None:
            job.ticket = job.ticket.with_group(advance.remaining)
            self.release(job, job.ending if job.ending and advance.remaining.sequences else ABORTED)
        else:
            self.worker.holders.give_back(job.ticket, advance.freed)
            self._extender.want(advance.key, advance.wanted_blocks)

    def _stop(self, job: PrefillJob) -> None:
        if self.running.get(job.ticket.holder_id) is job:
            self._extender.remove(job.ticket.holder_id)
        super()._stop(job)
