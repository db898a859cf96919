"""Continues a request for a client that lost its stream: here, or from another gateway's ticket."""

from services.gateway.api import GenerationRequest
from services.gateway.identity import client_id
from services.gateway.request.attempt import Attempt
from services.gateway.request.request import Request
from services.gateway.request.status import RequestStatus
from services.gateway.workers.lease import DetachedTicket
from services.runtime.errors import DuplicateRequest
from services.runtime.logging import get_logger

log = get_logger(__name__)


def resume(request: Request, call: Request) -> None:
    """Continue for a client that lost its stream, with another call. Its output holds the tokens
    that the client has received, and gets the rest; the deadline of the new call holds. Raises
    DuplicateRequest if the call is for another request."""
    before, output = request.output, call.output
    if not _continue_alike(call, request) or output.is_ahead_of(before):
        raise DuplicateRequest("the running request is not the one to continue")
    before.close(DuplicateRequest("another call continues this request"))
    request.asked, request.sampling, request.output = call.asked, call.sampling, output
    output.stats.add_call(before.stats)
    request.record.stats, request.record.caller = output.stats, call.asked.caller
    request.watch_deadline()
    # The gateway does not keep the logprobs of tokens that the client has not received.
    must_recompute = request.wants_logprobs and before.is_ahead_of(output)
    if must_recompute:
        _recompute(request)
    else:
        output.catch_up(before)
        if output.has_ended:
            request.close()
    if call.trace is not None and request.trace is not None:
        call.trace.join(request.trace)


def _recompute(request: Request) -> None:
    """Start again: sequences that run, or are detached, are ahead of the client's tokens."""
    if detached := request.attempt.detached:
        detached.abort()
    if request.status is not RequestStatus.QUEUED:
        request.requeue()


def adopt(request: Request, detached: DetachedTicket) -> None:
    """Continue a request of another gateway, with its queue position, its ticket, and the
    tokens that the client has not received. The request may end with these tokens."""
    ticket = detached.ticket
    gained = request.tickets.adopt(ticket)
    request.record.order = request.order
    request.output.stats.note_prefill(ticket.num_cached_tokens)
    request.started_at = request.clock()
    request.attempt = Attempt(request.id, request.attempt.number, detached)
    if gained and request.wants_logprobs:
        detached.abort()  # the logprobs of these tokens are lost: compute the tokens again
    elif problem := request.tickets.problem(gained, ticket):
        log.warning("parked_ticket_refused", request_id=client_id(request.id), reason=problem)
        detached.abort()
    else:
        request.deliver(gained)


def _continue_alike(one: Request, other: Request) -> bool:
    """Whether both ask for the same tokens, so that one can continue the other."""
    first, second = one.asked, other.asked
    if not (isinstance(first, GenerationRequest) and isinstance(second, GenerationRequest)):
        return False
    ours, theirs = first.sampling, second.sampling
    return (
        (one.model, one.prompt_token_ids) == (other.model, other.prompt_token_ids)
        and one.sampling.samples_like(other.sampling)
        and (one.adapter, one.parsing) == (other.adapter, other.parsing)
        and (one.cache_salt, one.prompt_logprobs) == (other.cache_salt, other.prompt_logprobs)
        and ours.stop == theirs.stop
        and ours.include_stop_str_in_output == theirs.include_stop_str_in_output
        and ours.skip_special_tokens == theirs.skip_special_tokens
    )
