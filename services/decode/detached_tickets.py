"""Detached tickets of a decode worker: handed over, parked or swapped out.

A detached ticket waits until another worker, or this one, claims it. The worker releases its blocks
if it is aborted, if the store demands its blocks, or if its time limit expires.

See ADR 50 and ADR 63.
"""

from dataclasses import replace

from blockstore.errors import StaleHolder
from services.decode.job import Job, State, ticket_of
from services.protocol.messages import Requeued, RequeueReason
from services.protocol.ticket import Swapped, Ticket
from services.worker.pool_worker import PoolWorker
from services.worker.requests.events import PREEMPTED, STALE, Ending, report, without_blocks
from services.worker.requests.jobs import Jobs


class DetachedTickets:
    """The detached tickets of `worker`; `jobs`: all jobs of the worker."""

    def __init__(self, worker: PoolWorker, jobs: Jobs[Job]) -> None:
        self._worker = worker
        self._jobs = jobs
        self._on_pool: dict[str, Job] = {}
        """By holder id: the jobs that are not swapped out."""

    def get(self, holder_id: str) -> Job | None:
        return self._on_pool.get(holder_id)

    def put(self, job: Job, ticket: Ticket) -> None:
        """Detach a ticket and offer it to its gateway.

        No worker writes the ticket's blocks until a worker claims it. Blocks that the store grants
        to the holder at the same time belong to the claiming worker: the claim names them.
        """
        job.state, job.ending = State.DETACHED, None
        job.ticket = replace(ticket, holder_epoch=ticket.holder_epoch + 1)
        self._on_pool[ticket.holder_id] = job
        self.offer(job)

    def offer(self, job: Job) -> None:
        """Send a detached ticket to its gateway once the store has detached the holder, unless
        another gateway has taken over the request by then.

        An offer to a new gateway may run beside the first one, so it detaches the holder again.
        """
        worker, session, ticket = self._worker, job.session, ticket_of(job)
        holder = ticket.holder_id, ticket.holder_epoch - 1

        async def offer() -> None:
            try:
                await worker.store.detach(worker.pool_id, *holder)
            except StaleHolder:  # a worker has claimed it: there is nothing to offer
                self.forget(job)
                report(session, ticket, STALE)
            else:
                if not job.ending and job.session is session:
                    detached = ticket_of(job)
                    session.send(Requeued(*detached.key, RequeueReason.HANDED_OVER, detached))
            worker.suspects.leave(ticket.holder_id)

        self._jobs.end_after(worker.limits.ticket_ttl_s, job, STALE)
        worker.writer.put(offer)

    def put_swapped(self, job: Job, swapped: Swapped) -> None:
        """Keep the ticket of a request that is swapped out, and release its blocks here."""
        worker, ticket, limits = self._worker, ticket_of(job), self._worker.limits
        detached = replace(without_blocks(ticket), swapped=swapped)

        async def release() -> None:
            await worker.holders.release(ticket, job.ending or PREEMPTED)
            if not job.ending:
                job.session.send(Requeued(*detached.key, RequeueReason.PREEMPTED, detached))
            worker.suspects.leave(ticket.holder_id)

        job.state, job.ticket = State.DETACHED, detached
        job.trace.end(PREEMPTED)
        worker.writer.put(release)
        if job.ending:
            self.take_back(job, job.ending)
        else:
            ttl_s = limits.ticket_ttl_s if worker.draining else limits.swapped_ttl_s
            self._jobs.end_after(ttl_s, job, STALE)

    def take_back(self, job: Job, ending: Ending) -> None:
        """Release a detached ticket, and report `ending` unless a worker has claimed the ticket."""

        async def take_back() -> None:
            await self._worker.holders.release_detached(job.session, ticket_of(job), ending)
            self.forget(job)

        self._worker.writer.put(take_back)

    def forget(self, job: Job) -> None:
        """Remove a job whose ticket was claimed or released. No error if it is removed already."""
        holder_id = ticket_of(job).holder_id
        if self.get(holder_id) is job:
            del self._on_pool[holder_id]
        job.state = State.ENDED
        self._jobs.remove(job)
