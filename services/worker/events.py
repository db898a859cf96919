"""What a worker tells a gateway; `service.py` of each worker turns it into protobuf."""

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
    """Why a request ends early at a worker, and so what its gateway hears: a requeue, an error
    (code and message), or nothing where it asked for the end itself."""

    requeue: RequeueReason | None = None
    error: tuple[str, str] | None = None


ABORTED = Ending()
EXPIRED = Ending(error=(DeadlineExceeded.code, "the request's deadline has passed"))
PREEMPTED = Ending(requeue=RequeueReason.PREEMPTED)
DRAINED = Ending(requeue=RequeueReason.DRAINING)
STALE = Ending(requeue=RequeueReason.STALE_TICKET)
FORGED = Ending(error=(InvalidRequest.code, "the ticket's blocks are not those of its holder"))
HANDED_OVER = Ending(requeue=RequeueReason.HANDED_OVER)
"""The one early end that keeps the blocks."""


def poisoned(fault: Fault) -> Ending:
    return Ending(error=(PoisonRequest.code, f"this request cannot be computed: {fault.value}"))


@dataclass(frozen=True, slots=True)
class Began:
    """The engine gets it next."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Requeued:
    """A ticket with blocks is at rest, for whoever claims it; one without is computed again."""

    ticket: Ticket
    reason: RequeueReason


@dataclass(frozen=True, slots=True)
class Failed:
    """`code`: of a domain error (`services.common.errors`)."""

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
    """One sequence's first token, or its token of one step. `position`: counted from the start of
    the prompt. `logprobs`: where the sampling asks for them."""

    request_id: str
    attempt: int
    index: int
    position: int
    token_id: int
    finish: FinishReason | None
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """One of the sequences that a beam search found, whole; or, without tokens, the word that the
    search goes on."""

    request_id: str
    attempt: int
    index: int
    position: int
    token_ids: tuple[int, ...] = ()
    finish: FinishReason | None = None
    score: float | None = None


@dataclass(frozen=True, slots=True)
class Prefilled:
    """`outputs`: a token of every sequence of the ticket that came. `ticket`: at rest, with the
    sequences that go on, and their blocks; where none does, all blocks are released.
    `prompt_logprobs`: of each token of the prompt but the first, where asked for."""

    ticket: Ticket
    outputs: tuple[Output | Found, ...]
    prompt_logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """All outputs of one step that belong to one gateway."""

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
    """Best first."""
    position = len(ticket.prompt_token_ids)
    return [
        Found(*ticket.key, index, position, one.token_ids, one.finish, one.score)
        for index, one in enumerate(hypotheses)
    ]


class Session(Protocol):
    """One gateway's stream, as the worker's logic sees it."""

    def send(self, event: Event, then: Callable[[], None] | None = None) -> None:
        """Never blocks; a session whose peer does not read is closed. `then` is called once the
        event is out, so that it arrives even if this process dies; not at all if the session ends
        before."""

    def finish(self) -> None:
        """What was sent goes out, and then the session ends."""


def report(session: Session, ticket: Ticket, ending: Ending) -> None:
    """Tell the gateway how a request ended early; its blocks are released."""
    if ending.requeue:
        at_rest = tuple(
            replace(sequence, block_ids=(), num_computed_tokens=0) for sequence in ticket.sequences
        )
        anew = replace(ticket, holder_epoch=0, sequences=at_rest, swapped=None)
        session.send(Requeued(anew, ending.requeue))
    elif ending.error:
        session.send(Failed(*ticket.key, *ending.error))
