"""Parked lookup: asks the decode workers for a request that another gateway left there.

See ADR 63.
"""

import asyncio
from collections.abc import Sequence

from blockstore.records import PoolSpec
from services.gateway.request.request import Request
from services.gateway.request.tickets import new_ticket
from services.gateway.scheduling.router import Router
from services.gateway.workers.lease import DetachedTicket
from services.gateway.workers.worker import Worker
from services.protocol.messages import Failed, RequestEvent, Requeued, Resume
from services.protocol.ticket import Ticket


class ParkedLookup:
    """The lookup of one request. It asks all workers at once, takes the first ticket, and aborts
    the request at workers that answer later or never."""

    def __init__(self, request: Request, attempt: int) -> None:
        self._request = request
        self._attempt = attempt
        self._asked: dict[Worker, Ticket] = {}
        self._found: asyncio.Future[DetachedTicket | None] = (
            asyncio.get_running_loop().create_future()
        )

    async def run(
        self, workers: Sequence[tuple[Worker, PoolSpec]], router: Router, timeout_s: float
    ) -> DetachedTicket | None:
        """The parked ticket; None if no worker has it, and the request is computed again."""
        request, attempt = self._request, self._attempt
        for worker, spec in workers:
            root_hash = router.root(spec, request)
            wanted = new_ticket(request, attempt, 0, spec.pool_id, root_hash)
            self._asked[worker] = wanted
            worker.send(Resume(*wanted.key, wanted.digest))
        if not workers:
            return None
        try:
            await asyncio.wait([self._found], timeout=timeout_s)
            return self._found.result() if self._found.done() else None
        finally:
            for worker in self._asked:
                worker.abort(request.id, attempt)

    def on_event(self, sender: Worker, event: RequestEvent) -> None:
        if sender not in self._asked or event.attempt != self._attempt:
            return
        if isinstance(event, Requeued) and event.ticket is not None and event.ticket.is_detached:
            ticket = self._asked[sender].with_state(event.ticket)
            self._has_answered(sender, DetachedTicket(sender, ticket))
        elif isinstance(event, Requeued | Failed):
            self._has_answered(sender, None)

    def on_lost(self, worker: Worker) -> None:
        if worker in self._asked:
            self._has_answered(worker, None)

    def _has_answered(self, worker: Worker, found: DetachedTicket | None) -> None:
        self._asked.pop(worker, None)
        if found and self._found.done():
            worker.abort(self._request.id, self._attempt)
        elif not self._found.done() and (found or not self._asked):
            self._found.set_result(found)
