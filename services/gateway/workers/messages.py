"""What the gateway and its workers say to each other, free of protobuf: commands out, events in.

Everything about a request carries (request, attempt); `services.gateway.workers.wire` turns these
into the messages of the Prefill and Decode streams and back.
"""

from dataclasses import dataclass
from enum import Enum

from blockstore.registry import Load
from services.protocol.logprobs import Logprobs
from services.protocol.ticket import FinishReason, Ticket


@dataclass(frozen=True, slots=True)
class Reserve:
    """To a decode worker: keep slots free before any work is done."""

    request_id: str
    attempt: int
    num_sequences: int = 1


@dataclass(frozen=True, slots=True)
class Submit:
    """To a prefill worker: compute a ticket that has no blocks. `prompt_logprobs`: and tell those
    of its prompt, each with so many of the likeliest tokens. `suspect`: begin it while no other
    suspect is being computed there."""

    ticket: Ticket
    prompt_logprobs: int | None = None
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Admit:
    """To a decode worker: claim this ticket and go on with it; `suspect` as above."""

    ticket: Ticket
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Abort:
    """To whoever may have a request, a reservation or a ticket at rest: let go of it; with an
    `index`, of that one sequence, and go on with the others."""

    request_id: str
    attempt: int
    index: int | None = None


@dataclass(frozen=True, slots=True)
class HandOver:
    """To a decode worker: finish the step, and give the request back with its blocks at rest."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Resume:
    """To a decode worker: give back, with its blocks at rest, what goes on as this ticket and was
    another gateway's. Answered by Requeued."""

    ticket: Ticket


Command = Reserve | Submit | Admit | Abort | HandOver | Resume


@dataclass(frozen=True, slots=True)
class Reserved:
    request_id: str
    attempt: int
    granted: bool


@dataclass(frozen=True, slots=True)
class Began:
    """From here on the worker computes it; it said so before."""

    request_id: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Generated:
    """What a prefill or one decode step gave one sequence. `position`: of its first token, counted
    from the start of the prompt. `logprobs`: of each token, or none. `score`: of a sequence that a
    beam search found; while it searches, there are no tokens."""

    request_id: str
    attempt: int
    index: int
    position: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    logprobs: tuple[Logprobs, ...] = ()
    score: float | None = None

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.attempt


@dataclass(frozen=True, slots=True)
class Prefilled:
    """`outputs`: the next token of every sequence submitted. The ticket has those that go on, with
    their blocks; none, if all have ended. `prompt_logprobs`: of each token of the prompt but the
    first, where they were asked for."""

    ticket: Ticket
    outputs: tuple[Generated, ...]
    prompt_logprobs: tuple[Logprobs, ...] = ()

    @property
    def request_id(self) -> str:
        return self.ticket.request_id

    @property
    def attempt(self) -> int:
        return self.ticket.attempt


@dataclass(frozen=True, slots=True)
class Failed:
    """`code` is a domain error's."""

    request_id: str
    attempt: int
    code: str
    message: str


class RequeueReason(Enum):
    PREEMPTED = "preempted"
    DRAINING = "draining"
    STALE_TICKET = "stale_ticket"
    HANDED_OVER = "handed_over"


@dataclass(frozen=True, slots=True)
class Requeued:
    """A worker gives a request back. `ticket`: at rest, with blocks (in its pool, or swapped out)
    that the worker keeps until somebody claims them; None: the gateway builds it anew from what the
    client has, and from where its beam `search` stands, if it is one."""

    request_id: str
    attempt: int
    reason: RequeueReason
    ticket: Ticket | None = None
    search: Ticket | None = None


@dataclass(frozen=True, slots=True)
class Malformed:
    """A message about a request that makes no sense."""

    request_id: str
    attempt: int
    problem: str


RequestEvent = Malformed | Reserved | Began | Prefilled | Generated | Failed | Requeued


@dataclass(frozen=True, slots=True)
class LoadReport:
    """`stalled`: the worker waits for its block store."""

    load: Load
    draining: bool = False
    stalled: bool = False


@dataclass(frozen=True, slots=True)
class DrainNotice:
    """The worker takes no new work any more."""


Event = RequestEvent | LoadReport | DrainNotice
