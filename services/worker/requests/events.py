"""The events that a worker sends to a gateway: outputs of its engine, and early ends."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from services.engine.batch import Fault
from services.protocol.messages import Failed, Requeued, RequeueReason, WorkerEvent
from services.protocol.ticket import Ticket
from services.runtime.errors import DeadlineExceeded, InvalidRequest, PoisonRequest


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a request ends early at a worker, and what its gateway gets: a requeue, an error (code
    and message), or nothing if the gateway itself has aborted the request."""

    requeue: RequeueReason | None = None
    error: tuple[str, str] | None = None


ABORTED = Ending()
EXPIRED = Ending(error=(DeadlineExceeded.code, "the request's deadline has passed"))
PREEMPTED = Ending(requeue=RequeueReason.PREEMPTED)
DRAINED = Ending(requeue=RequeueReason.DRAINING)
STALE = Ending(requeue=RequeueReason.STALE_TICKET)
FORGED = Ending(error=(InvalidRequest.code, "the ticket's blocks are not its holder's"))
HANDED_OVER = Ending(requeue=RequeueReason.HANDED_OVER)
"""The only early end that keeps the blocks."""


def poisoned(fault: Fault) -> Ending:
    if fault is Fault.GRAMMAR:
        return Ending(error=(InvalidRequest.code, f"this request has ended: {fault.value}"))
    return Ending(error=(PoisonRequest.code, f"this request cannot be computed: {fault.value}"))


class Session(Protocol):
    """One gateway's stream, as the worker's logic sees it."""

    def send(self, event: WorkerEvent, then: Callable[[], None] | None = None) -> None:
        """Queue an event; never blocks. A session whose gateway does not read is closed. `then` is
        called once the event is written, so the event arrives even if this process dies from then
        on; it is not called if the session ends before."""

    def finish(self) -> None:
        """Close the session after all queued events are written."""


def without_blocks(ticket: Ticket) -> Ticket:
    """The ticket of a request whose blocks are released: its tokens are to be computed again."""
    sequences = (replace(s, block_ids=(), num_computed_tokens=0) for s in ticket.sequences)
    return replace(ticket, holder_epoch=0, sequences=tuple(sequences), swapped=None)


def report(session: Session, ticket: Ticket, ending: Ending) -> None:
    """Report an early end to the gateway. The blocks are released before."""
    if ending.requeue:
        session.send(Requeued(*ticket.key, ending.requeue, without_blocks(ticket)))
    elif ending.error:
        session.send(Failed(*ticket.key, *ending.error))
