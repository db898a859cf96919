"""The leases of a request at workers. Each lease is released once, by `abort` or by `finish`."""

import asyncio

from services.gateway.identity import client_id
from services.gateway.workers.worker import PrefillLoad, Worker
from services.protocol.messages import Reserve, Submit
from services.protocol.ticket import Ticket
from services.runtime.logging import get_logger

log = get_logger(__name__)


class Lease:
    """One thing that a request has at a worker, under one attempt number. Its class is its kind."""

    def __init__(self, worker: Worker, request_id: str, attempt: int) -> None:
        self.worker = worker
        self.request_id = request_id
        self.attempt = attempt
        self.released = False

    def abort(self) -> None:
        """Release the lease and tell the worker to end it. A released lease stays as it is."""
        if not self.released:
            self.worker.abort(self.request_id, self.attempt)
            self.finish()

    def finish(self) -> None:
        """Release the lease without a message: the worker ended it by itself, or is lost. A
        released lease stays as it is."""
        if not self.released:
            self.released = True
            self._on_release()

    def _on_release(self) -> None:
        """Update what the gateway counts at the worker."""


class PrefillLease(Lease):
    """A ticket that a prefill worker computes. The constructor submits it."""

    def __init__(self, worker: Worker, submit: Submit, load: PrefillLoad) -> None:
        super().__init__(worker, *submit.ticket.key)
        worker.prefill_loads[self.request_id] = load
        worker.send(submit)

    def _on_release(self) -> None:
        self.worker.prefill_loads.pop(self.request_id, None)


class DetachedTicket(Lease):
    """A ticket that no worker runs. Its issuer keeps the blocks, in its pool or swapped out, until
    another worker claims them. It `is_sent` once a decode worker was asked to claim it."""

    def __init__(self, worker: Worker, ticket: Ticket) -> None:
        super().__init__(worker, *ticket.key)
        self.ticket = ticket
        self.is_sent = False


class DecodeReservation(Lease):
    """The decode slots of `num_sequences` sequences, all or none, and later the sequences that run
    in them. The constructor asks for the slots; they count as taken from then on."""

    def __init__(self, worker: Worker, request_id: str, attempt: int, num_sequences: int) -> None:
        super().__init__(worker, request_id, attempt)
        self._num_asked = self._num_taken = num_sequences
        self._answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        worker.num_taken_slots += num_sequences
        worker.send(Reserve(request_id, attempt, num_sequences))

    @property
    def granted(self) -> bool:
        return self._answer.done() and self._answer.result()

    @property
    def refused(self) -> bool:
        return self._answer.done() and not self._answer.result()

    def set_answer(self, granted: bool) -> None:
        """Note the worker's answer. Only the first one counts."""
        if not self._answer.done():
            self._answer.set_result(granted)

    async def wait_for_answer(self, timeout_s: float) -> None:
        """Wait for the answer, the release or the timeout. A worker that does not answer in time
        gets no further reservation until it has answered."""
        await asyncio.wait([self._answer], timeout=timeout_s)
        if not self._answer.done():  # the worker may still grant it, after the request has gone on
            log.warning(
                "reservation_unanswered",
                request_id=client_id(self.request_id),
                worker_id=self.worker.id,
            )
            self.worker.unresponsive = True

    def shrink_to(self, num_sequences: int) -> None:
        """Free the slots of ended sequences; `num_sequences` keep theirs."""
        self.worker.num_taken_slots -= self._num_taken - num_sequences
        self._num_taken = num_sequences

    def abort_sequence(self, index: int) -> None:
        """Tell the worker to end one sequence and to continue the others."""
        self.worker.abort(self.request_id, self.attempt, index)

    def abort(self) -> None:
        """See `Lease.abort`. A worker that refused has nothing to end."""
        if self.refused:
            self.finish()
        else:
            super().abort()

    def _on_release(self) -> None:
        self.worker.num_taken_slots -= self._num_taken
        self.worker.forget_refusals()
        if self.refused:
            self.worker.refuse(self._num_asked)
        self.set_answer(False)
