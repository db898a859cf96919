"""Parked lookup: asks the decode workers for a request that another gateway left there.

See ADR 63.
"""

import asyncio
from collections.abc import Sequence

from blockstore.records import PoolSpec
from services.gateway.intake.admission import AdmittedRequest
from services.gateway.request.lease import DetachedTicket
from services.gateway.request.tickets import is_same_request, new_ticket, ticket_sequences
from services.gateway.scheduling.router import Router
from services.gateway.streaming.output import Output
from services.gateway.workers.worker import Worker
from services.protocol.messages import (
    Failed,
    Generated,
    Malformed,
    RequestEvent,
    Requeued,
    Resume,
)
from services.protocol.ticket import FinishReason, Ticket


class ParkedLookup:
    """The lookup of one request, whose `output` has what the client has received. It asks all
    workers at once, takes the first ticket, and aborts the request at workers that answer later or
    never."""

    def __init__(self, request: AdmittedRequest, output: Output, attempt: int) -> None:
        self._request = request
        self._sequences = ticket_sequences(output)
        self._attempt = attempt
        self._asked: dict[Worker, Ticket] = {}
        self._found: asyncio.Future[DetachedTicket | None] = (
            asyncio.get_running_loop().create_future()
        )

    async def run(
        self, workers: Sequence[tuple[Worker, PoolSpec]], router: Router, timeout_s: float
    ) -> DetachedTicket | None:
        """The parked ticket; None: no worker has it, and the request is computed again."""
        request, sequences = self._request, self._sequences
        for worker, spec in workers:
            root_hash = router.root(spec, request)
            wanted = new_ticket(request, self._attempt, 0, spec.pool_id, root_hash, sequences)
            self._asked[worker] = wanted
            worker.send(Resume(wanted))
        if not workers:
            return None
        try:
            await asyncio.wait([self._found], timeout=timeout_s)
            return self._found.result() if self._found.done() else None
        finally:
            for worker in self._asked:
                worker.abort(self._request.request_id, self._attempt)

    def on_event(self, sender: Worker, event: RequestEvent) -> None:
        if sender not in self._asked or event.attempt != self._attempt:
            return
        wanted = self._asked[sender]
        match event:
            case Requeued(ticket=Ticket() as ticket) if is_same_request(ticket, wanted):
                self._has_answered(sender, DetachedTicket(sender, ticket))
            case Requeued(ticket=None) | Failed() | Generated(finish_reason=FinishReason()):
                self._has_answered(sender, None)
            case Requeued() | Malformed():  # the worker may keep another ticket for us
                self._has_answered(sender, None)
                sender.abort(self._request.request_id, self._attempt)

    def on_lost(self, worker: Worker) -> None:
        if worker in self._asked:
            self._has_answered(worker, None)

    def _has_answered(self, worker: Worker, found: DetachedTicket | None) -> None:
        self._asked.pop(worker, None)
        if found and self._found.done():
            worker.abort(self._request.request_id, self._attempt)
        elif not self._found.done() and (found or not self._asked):
            self._found.set_result(found)
