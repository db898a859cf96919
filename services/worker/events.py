"""Events that a worker sends to a gateway.

`services.worker.stream` and the `service.py` of each role turn them into protobuf.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from services.common.errors import DeadlineExceeded, InvalidRequest, PoisonRequest
from services.engine.batch import Fault
from services.engine.sequences.group import Token
from services.protocol.logprobs import Logprobs
from services.protocol.ticket import FinishReason, Hypothesis, Ticket


class RequeueReason(Enum):
    PREEMPTED = "preempted"
    DRAINING = "draining"
    STALE_TICKET = "stale_ticket"
    HANDED_OVER = "handed_over"


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
FORGED = Ending(error=(InvalidRequest.code, "the ticket's blocks are not those of its holder"))
HANDED_OVER = Ending(requeue=RequeueReason.HANDED_OVER)
"""The only early end that keeps the blocks."""


def poisoned(fault: Fault) -> Ending:
    return Ending(error=(PoisonRequest.code, f"this request cannot be computed: {fault.value}"))


@dataclass(frozen=True, slots=True)
class Began:
    """The engine runs this request next."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Requeued:
    """A request goes back to its model queue. A ticket with blocks is detached, and any worker of
    the pool may claim it; a ticket without blocks goes through prefill again."""

    ticket: Ticket
    reason: RequeueReason


@dataclass(frozen=True, slots=True)
class Failed:
    """A request ended with an error. `code`: of a domain error (`services.common.errors`)."""

    request_id: str
    attempt: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class Reserved:
    request_id: str
    attempt: int
    granted: bool


@dataclass(frozen=True, slots=True)
class Output:
    """The token of one sequence from one step. `position`: counted from the start of the prompt.
    `logprobs`: present if the sampling parameters ask for them."""

    request_id: str
    attempt: int
    index: int
    position: int
    token_id: int
    finish: FinishReason | None
    logprobs: Logprobs | None = None

    @property
    def num_tokens(self) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Found:
    """One hypothesis that a beam search found, complete; without tokens it says that the search
    continues."""

    request_id: str
    attempt: int
    index: int
    position: int
    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    score: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt is computed.

    `outputs`: a token of every sequence of the submitted ticket. `ticket`: detached, with the
    sequences that go on and their blocks; if no sequence goes on, all blocks are released.
    `prompt_logprobs`: of each prompt token but the first, if the request asks for them.
    """

    ticket: Ticket
    outputs: tuple[Output | Found, ...]
    prompt_logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """All outputs of one step for one gateway."""

    outputs: tuple[Output | Found, ...]


@dataclass(frozen=True, slots=True)
class Draining:
    num_running: int


Event = Began | Prefilled | Requeued | Failed | Reserved | Step | Draining


def output(ticket: Ticket, token: Token) -> Output:
    return Output(
        *ticket.key,
        index=token.index,
        position=token.position,
        token_id=token.token,
        finish=token.finish,
        logprobs=token.logprobs,
    )


def found(ticket: Ticket, hypotheses: Sequence[Hypothesis]) -> list[Found]:
    """The hypotheses of a search as events, best first."""
    position = len(ticket.prompt_token_ids)
    return [
        Found(*ticket.key, index, position, one.token_ids, one.finish, one.score)
        for index, one in enumerate(hypotheses)
    ]


class Session(Protocol):
    """One gateway's stream, as the worker's logic sees it."""

    def send(self, event: Event, then: Callable[[], None] | None = None) -> None:
        """Queue an event; never blocks. A session whose gateway does not read is closed. `then` is
        called once the event is written, so the event arrives even if this process dies from then
        on; it is not called if the session ends before."""

    def finish(self) -> None:
        """Close the session after all queued events are written."""


def report(session: Session, ticket: Ticket, ending: Ending) -> None:
    """Report an early end to the gateway. The blocks are released before, so a requeued ticket has
    none."""
    if ending.requeue:
        at_rest = tuple(
            replace(sequence, block_ids=(), num_computed_tokens=0) for sequence in ticket.sequences
        )
        anew = replace(ticket, holder_epoch=0, sequences=at_rest, swapped=None)
        session.send(Requeued(anew, ending.requeue))
    elif ending.error:
        session.send(Failed(*ticket.key, *ending.error))
