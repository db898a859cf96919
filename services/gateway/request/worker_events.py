"""Applies the messages of workers, and the loss of workers, to a request."""

from collections.abc import Sequence

from quire.worker_names import worker_name
from services.gateway.identity import client_id
from services.gateway.request.events import BlocksAwaited, Computed, Phase, Preempted, SetBack
from services.gateway.request.request import Request
from services.gateway.request.sending import admit, continue_at
from services.gateway.request.status import RequestStatus
from services.gateway.workers.lease import DecodeReservation, DetachedTicket, Lease, PrefillLease
from services.gateway.workers.worker import Worker
from services.protocol.messages import (
    AwaitsBlocks,
    Began,
    Failed,
    Generated,
    PoolingMode,
    Prefilled,
    RequestEvent,
    Requeued,
    RequeueReason,
    Reserved,
)
from services.protocol.ticket import FinishReason, TicketState
from services.runtime.errors import InvalidRequest
from services.runtime.logging import get_logger
from services.runtime.rpc.error_table import error_of

log = get_logger(__name__)


def on_event(request: Request, sender: Worker, event: RequestEvent) -> None:
    """Apply a worker's message. A message is dropped if the request has no lease at that worker
    under that attempt number, or if the message does not fit the request's status.

    A message that ends something at the worker finishes its lease first; what the request does then
    (requeue, close) aborts the other leases.
    """
    lease = request.attempt.lease_of(sender, event.attempt)
    is_current = event.attempt == request.attempt.number  # else for a target or an older ticket
    match lease, event:
        case DecodeReservation() as reservation, Reserved(granted=granted):
            reservation.set_answer(granted)
        case DetachedTicket() as detached, Requeued() | Failed() if not is_current:
            _on_ticket_dropped(request, detached)
        case _ if not is_current:
            _drop(request, event)
        case DecodeReservation() as decode, Generated() as step if request.is_decoding:
            # Tokens after a stop string are dropped: the worker has not received the abort yet.
            if not request.output.is_over(step.index) and _fits(request, decode, [step]):
                if request.tickets.is_progress([step]):
                    request.crash_attribution.note_token(sender)
                    request.num_retries = 0
                request.attempt.mark_claimed(sender)
                if request.record.phase is not Phase.DECODE:
                    request.record.enter(Phase.DECODE, sender.id)
                request.deliver([step])
        case PrefillLease() as prefill, Prefilled() as prefilled:
            _on_prefilled(request, prefill, prefilled)
        case _, Began():
            if isinstance(lease, PrefillLease):
                request.output.stats.note_prefill(event.num_cached_tokens)
                request.record.enter(Phase.PREFILL, sender.id)
            request.crash_attribution.note_begun(sender)
        case PrefillLease(), AwaitsBlocks(num_needed=needed, num_available=available):
            holders = request.other_holders(sender.member.pool_id)
            request.record.note(BlocksAwaited(sender.id, needed, available, holders))
        case DecodeReservation() as decode, Requeued(ticket=TicketState() as state) if (
            state.is_detached
        ):
            _on_detached(request, decode, state)
        case Lease() as returned, Requeued() as requeued:
            _on_requeued(request, returned, requeued)
        case DecodeReservation() as decode, Failed(code=InvalidRequest.code) as failed if (
            request.is_decoding
            and request.attempt.detached  # the worker has not claimed the ticket
        ):
            decode.finish()
            request.retry_or_fail(f"decode worker {sender.id} refused its ticket: {failed.message}")
        case Lease() as failing, Failed() as failed:
            failing.finish()
            request.close(error_of(failed.code, failed.message))
        case _:
            _drop(request, event)


def on_lost(request: Request, worker: Worker, *, died: bool) -> None:
    """A worker's stream ended: by contract the worker releases all that came over it."""
    had_lease = request.attempt.finish_leases_at(worker)
    search = request.tickets.search
    if request.is_decoding and search is not None and search.is_repeating:
        died = False  # other workers have computed these steps and survived
    if error := request.crash_attribution.note_lost(worker, died=died):
        request.close(error)
    elif had_lease:
        request.retry_or_fail(f"{worker.member.role} worker {worker.id} was lost")


def _drop(request: Request, event: RequestEvent) -> None:
    log.debug("event_dropped", request_id=client_id(request.id), kind=type(event).__name__)


def _fits(
    request: Request, lease: Lease, outputs: Sequence[Generated], state: TicketState | None = None
) -> bool:
    """Whether a worker continues the request where the client is; otherwise the request is retried,
    or fails."""
    problem = request.tickets.problem(outputs, state)
    if problem:
        request.retry_or_fail(f"{lease.worker.member.role} worker {lease.worker.id} {problem}")
    return not problem


def _on_ticket_dropped(request: Request, detached: DetachedTicket) -> None:
    """The issuer does not keep the ticket of an earlier attempt any more."""
    detached.finish()
    if request.is_decoding:
        request.requeue()


def _on_prefilled(request: Request, lease: PrefillLease, event: Prefilled) -> None:
    """Sequences that have not ended with this token go to the decode worker."""
    if not _fits(request, lease, event.outputs, event.ticket):
        return
    request.crash_attribution.note_token(lease.worker)
    lease.worker.prefill_ns_per_token = event.ticket.prefill_ns_per_token
    request.output.stats.note_prefill(event.ticket.num_cached_tokens)
    needs_all = request.unsent_prompt_logprobs is not None or (
        request.pooling is not None and request.pooling.mode is PoolingMode.MEAN
    )
    num_cached = None if needs_all else event.ticket.num_cached_tokens
    request.record.note(Computed(request.num_tokens, num_cached))
    if event.prompt_logprobs:
        request.output.write_prompt(event.prompt_logprobs)
    if event.embedding:
        request.embedding, request.output.finish_reason = event.embedding, FinishReason.STOP
    request.tickets.note(event.ticket)
    if request.tickets.is_progress(event.outputs):
        request.num_retries = 0
    if event.ticket.sequences:
        request.detach(lease, event.ticket)
    else:
        lease.finish()
    request.deliver(event.outputs)
    if request.status is RequestStatus.PREFILLING:
        admit(request)


def _on_detached(request: Request, decode: DecodeReservation, state: TicketState) -> None:
    """A decode worker returned the request with its KV: swapped out because it was preempted, or in
    the pool because it was handed over."""
    if not _fits(request, decode, (), state):
        return
    request.tickets.note(state)
    request.detach(decode, state)
    if state.swapped is not None:
        _preempt(request, decode.worker, is_swapped=True)
    elif moved := request.attempt.attempt_at_target():
        continue_at(request, moved)
    else:
        request.record.note(SetBack("its worker gave it back"))
        request.requeue()


def _on_requeued(request: Request, lease: Lease, event: Requeued) -> None:
    """A worker returned the request without KV."""
    lease.finish()
    request.tickets.note(event.ticket)
    if event.reason is RequeueReason.STALE_TICKET:
        request.retry_or_fail("its ticket was not there any more when it was claimed")
        return
    if event.reason is RequeueReason.DRAINING:
        lease.worker.draining = True
        request.record.note(SetBack(f"{worker_name(lease.worker.id)} drains"))
        request.requeue()
    else:
        _preempt(request, lease.worker, is_swapped=False)


def _preempt(request: Request, worker: Worker, *, is_swapped: bool) -> None:
    request.output.stats.num_preemptions += 1
    holders = request.other_holders(worker.member.pool_id)
    request.record.note(Preempted(worker.id, is_swapped, holders))
    request.requeue(Phase.PREEMPTED)
