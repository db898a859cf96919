"""Sends a request to its workers: reserves slots, submits and admits its tickets, moves it, and has
its KV copied to another pool before it goes on there."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from blockstore.records import PrefixHash
from services.gateway.identity import client_id
from services.gateway.request.attempt import Attempt
from services.gateway.request.events import Moved, Phase
from services.gateway.request.request import Request
from services.gateway.request.status import RequestStatus
from services.gateway.workers.lease import DecodeReservation, DetachedTicket, PrefillLease
from services.gateway.workers.worker import PrefillLoad, Worker
from services.protocol.messages import Admit, HandOver, Submit
from services.protocol.ticket import Ticket
from services.runtime.errors import QuireError
from services.runtime.logging import get_logger

log = get_logger(__name__)


async def reserve(request: Request, decode: Worker, timeout_s: float) -> bool:
    """Ask a decode worker for slots. False: it refused, did not answer or was lost, or the
    request was closed meanwhile."""
    request.move_to(RequestStatus.RESERVING)
    attempt = request.attempt
    reservation = DecodeReservation(decode, request.id, attempt.number, request.num_sequences)
    attempt.decode = reservation
    await reservation.wait_for_answer(timeout_s)
    if reservation.released:
        return False
    if reservation.refused:
        reservation.finish()
        request.move_to(RequestStatus.QUEUED)
    elif not reservation.granted:
        request.requeue()
    return reservation.granted


def submit(
    request: Request,
    prefill: Worker,
    load: PrefillLoad,
    pool_id: str,
    root_hash: PrefixHash,
    source_pool_id: str = "",
) -> None:
    """Send the ticket to a prefill worker, with `load` to compute. The decode worker has granted
    the slots, if the request needs any. The cached prefix of the pool `source_pool_id` is copied
    first; if that fails, it is computed."""
    if not request.num_sequences:
        request.move_to(RequestStatus.RESERVING)  # there is nothing to reserve
    request.started_at = request.started_at or request.clock()
    ticket = request.tickets.submit(request.attempt.number, pool_id, root_hash, request.swapped)
    if not source_pool_id:
        _submit(request, prefill, load, ticket)
        return

    def go_on(_: DetachedTicket | None, _problem: str) -> None:
        if prefill.usable:
            _submit(request, prefill, load, replace(ticket, timeout_ms=request.timeout_ms()))
        else:
            request.requeue()

    _pull(request, ticket, source_pool_id, pool_id, go_on)


def _submit(request: Request, prefill: Worker, load: PrefillLoad, ticket: Ticket) -> None:
    request.move_to(RequestStatus.PREFILLING)
    request.crash_attribution.assign(prefill)
    submit = Submit(ticket, request.unsent_prompt_logprobs, request.pooling)
    request.attempt.prefill = PrefillLease(prefill, submit, load)


def admit(request: Request) -> None:
    """Send the detached ticket to the decode worker that has granted the slots. If its KV is in
    another pool, a mover copies it first."""
    was_decoding = request.is_decoding
    decode, detached = request.attempt.decode, request.attempt.detached
    assert decode is not None
    assert detached is not None
    detached.is_sent = True
    if detached.ticket.pool_id != decode.worker.member.pool_id:
        _pull_ticket(request, detached.ticket, decode.worker)
        return
    if not was_decoding:
        request.move_to(RequestStatus.DECODING)
    phase = Phase.MOVING if was_decoding else Phase.HAND_OFF
    request.record.enter(phase, decode.worker.id)
    ticket = request.tickets.admit(detached.ticket, request.attempt.number)
    request.crash_attribution.assign(decode.worker)
    decode.worker.send(Admit(ticket))


def _pull_ticket(request: Request, ticket: Ticket, decode: Worker) -> None:
    """Copy the KV of the detached ticket to the pool of its decode worker, then admit it."""
    target = decode.member.pool_id

    def go_on(pulled: DetachedTicket | None, problem: str) -> None:
        if pulled is None:
            request.retry_or_fail(f"its KV was not copied to {target}: {problem}")
            return
        request.attempt.replace_detached(pulled)
        cause = f"because {ticket.pool_id} had no slot for it"
        request.record.note(Moved(ticket.pool_id, target, cause))
        request.output.stats.num_moves += 1
        admit(request)

    request.record.enter(Phase.HAND_OFF)
    asked = request.tickets.admit(ticket, request.attempt.number)
    _pull(request, asked, ticket.pool_id, target, go_on)


def _pull(
    request: Request,
    ticket: Ticket,
    source_pool_id: str,
    target_pool_id: str,
    go_on: Callable[[DetachedTicket | None, str], None],
) -> None:
    """Copy a ticket's KV in a task, which then calls `go_on` with the copied ticket. The ticket is
    None if the mover copied only a prefix, or nothing; the text that follows says which."""

    async def run() -> None:
        try:
            pulled = await request.host.pull(ticket, source_pool_id, target_pool_id)
            go_on(pulled, "the mover copied only a prefix")
        except Exception as error:  # our own fault must not leave the request without attempt
            log.warning(
                "pull_failed",
                request_id=client_id(ticket.request_id),
                source=source_pool_id,
                target=target_pool_id,
                reason=str(error),
                exc_info=None if isinstance(error, QuireError) else error,
            )
            go_on(None, str(error) or repr(error))

    request.move_to(RequestStatus.PULLING)
    request.pull_task = asyncio.create_task(run(), name=f"pull {ticket.request_id}")


def reserve_target(request: Request, target: Worker, cause: str) -> DecodeReservation:
    """Ask another decode worker of the pool for slots. Meanwhile the request runs on. `Moved`
    tells the causes."""
    request.move_cause = cause
    number = request.next_number()
    reservation = DecodeReservation(target, request.id, number, request.num_sequences)
    request.attempt.target = reservation
    return reservation


def request_move(request: Request, target: DecodeReservation) -> bool:
    """Ask the decode worker to detach the sequences and to return their ticket, once the target has
    answered. False: the target refused or did not answer, or another move has replaced this one."""
    decode = request.attempt.decode
    if request.attempt.target is not target or decode is None:
        return False
    if target.granted:
        decode.worker.send(HandOver(request.id, decode.attempt))
    else:
        target.abort()
    return target.granted


def continue_at(request: Request, moved: Attempt) -> None:
    """Send the ticket, which was handed over, to the target of a move."""
    detached, target = moved.detached, moved.decode
    assert detached is not None
    assert target is not None
    request.record.note(Moved(detached.worker.id, target.worker.id, request.move_cause))
    request.attempt = moved
    request.moved_at = request.clock()
    request.output.stats.num_moves += 1
    admit(request)
