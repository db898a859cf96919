"""Looks at the decode workers for a request that another gateway left there."""

import asyncio
import secrets
from collections.abc import Sequence

from blockstore.store import PoolSpec
from services.common.ticket import FinishReason, Ticket, TicketSequence
from services.gateway.admission import Admitted
from services.gateway.messages import Failed, Generated, RequestEvent, Requeued, Resume
from services.gateway.router import Router
from services.gateway.slot import AtRest
from services.gateway.worker import Worker


class Search:
    """Every worker is asked at once; the first that has it is the one. Those that answer later, or
    never, are told to let go."""

    def __init__(self, request: Admitted, attempt: int) -> None:
        self._request = request
        self._attempt = attempt
        self._asked: set[Worker] = set()
        self._found: asyncio.Future[AtRest | None] = asyncio.get_running_loop().create_future()

    async def run(
        self, workers: Sequence[tuple[Worker, PoolSpec]], router: Router, timeout_s: float
    ) -> AtRest | None:
        """The ticket at rest; None: nobody has it, and it is computed again."""
        for worker, spec in workers:
            self._asked.add(worker)
            worker.send(Resume(self._wanted(spec, router)))
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
        match event:
            case Requeued(ticket=Ticket() as ticket) if self._is_it(ticket):
                self._has_answered(sender, AtRest(ticket, sender))
            case Requeued() | Failed() | Generated(finish_reason=FinishReason()):
                self._has_answered(sender, None)

    def on_lost(self, worker: Worker) -> None:
        if worker in self._asked:
            self._has_answered(worker, None)

    def _has_answered(self, worker: Worker, found: AtRest | None) -> None:
        self._asked.discard(worker)
        if found and self._found.done():
            worker.abort(self._request.request_id, self._attempt)
        elif not self._found.done() and (found or not self._asked):
            self._found.set_result(found)

    def _is_it(self, ticket: Ticket) -> bool:
        request = self._request
        return (ticket.prompt_token_ids, ticket.sampling) == (
            request.prompt_token_ids,
            request.sampling,
        )

    def _wanted(self, spec: PoolSpec, router: Router) -> Ticket:
        request = self._request
        return Ticket(
            request_id=request.request_id,
            attempt=self._attempt,
            order=0,
            pool_id=spec.pool_id,
            holder_id=secrets.token_hex(16),  # of nobody: it names no blocks
            holder_epoch=0,
            root_hash=router.root(spec, request.cache_salt),
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            sequences=(TicketSequence(0, request.received or ()),),
        )
