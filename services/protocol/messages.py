"""The messages between a gateway and its workers: commands, and the events that answer them.

`services.protocol.event_codec` and `services.protocol.command_codec` convert them to protobuf
messages and back.
"""

from dataclasses import dataclass
from enum import Enum

from blockstore.registry import Load
from services.protocol.logprobs import Logprobs
from services.protocol.ticket import FinishReason, Ticket


@dataclass(frozen=True, slots=True)
class RequestMessage:
    """A message about one attempt of a request."""

    request_id: str
    attempt: int

    @property
    def key(self) -> tuple[str, int]:
        return self.request_id, self.attempt


@dataclass(frozen=True, slots=True)
class Reserve(RequestMessage):
    """Asks a decode worker to keep decode slots free, before any work is done for the request."""

    num_sequences: int = 1


@dataclass(frozen=True, slots=True)
class Submit:
    """Sends a ticket without blocks to a prefill worker, to be computed.

    `prompt_logprobs`: also return the prompt's logprobs, each with so many of the likeliest tokens;
    None: do not. `suspect`: the worker begins the request only while it computes no other suspect.
    """

    ticket: Ticket
    prompt_logprobs: int | None = None
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Admit:
    """Sends a ticket with blocks to a decode worker, which claims it and continues it. `suspect`:
    see `Submit`."""

    ticket: Ticket
    suspect: bool = False


@dataclass(frozen=True, slots=True)
class Abort(RequestMessage):
    """Tells a worker to release everything that an attempt has there: a decode reservation, a
    running request or a detached ticket. With `index`, the worker ends only that sequence."""

    index: int | None = None


@dataclass(frozen=True, slots=True)
class HandOver(RequestMessage):
    """Asks a decode worker to finish the step, detach the request and return its ticket with its
    blocks (`Requeued`)."""


@dataclass(frozen=True, slots=True)
class Resume:
    """Asks a decode worker for a request that another gateway left. `ticket` has the tokens that
    the client received: what the worker has must continue them. The worker detaches the request and
    answers with `Requeued`, without a ticket if it does not have the request."""

    ticket: Ticket


Command = Reserve | Submit | Admit | Abort | HandOver | Resume


@dataclass(frozen=True, slots=True)
class Reserved(RequestMessage):
    """A decode worker's answer to `Reserve`."""

    granted: bool


@dataclass(frozen=True, slots=True)
class Began(RequestMessage):
    """The worker begins to compute the request. It sends this before it begins, so that a crash can
    be attributed."""


@dataclass(frozen=True, slots=True)
class Generated(RequestMessage):
    """The output of a prefill or of one decode step for one sequence.

    `position`: the position of the first token, counted from the start of the prompt. `logprobs`:
    one for each token, or none. `score`: of a hypothesis that a beam search found; while the search
    runs, outputs have no tokens. `embedding`: of a request for one, which has no tokens either.
    `num_drafts`: how many drafts the step verified, of which it accepted `num_accepted`: these are
    among its tokens.
    """

    index: int
    position: int
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    logprobs: tuple[Logprobs, ...] = ()
    score: float | None = None
    embedding: tuple[float, ...] = ()
    num_drafts: int = 0
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prefill worker has computed a ticket.

    `outputs`: the next token of each submitted sequence. `ticket`: the sequences that continue,
    with their blocks; none if all have ended. `prompt_logprobs`: one for each token of the prompt
    but the first, if the request asked for them.
    """

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
class Failed(RequestMessage):
    """A request ended at a worker with a domain error, whose code is `code`."""

    code: str
    message: str


class RequeueReason(Enum):
    """The reason why a worker returns a request."""

    PREEMPTED = "preempted"
    DRAINING = "draining"
    STALE_TICKET = "stale_ticket"
    HANDED_OVER = "handed_over"


@dataclass(frozen=True, slots=True)
class Requeued(RequestMessage):
    """A worker returns a request.

    `ticket`: a detached ticket, whose blocks (in its pool or swapped out) the worker keeps until
    another worker claims them; None: the gateway builds a new ticket from the tokens received.
    `progress`: a ticket without blocks, with what the worker had computed. The gateway uses only
    the state of a beam search of it.
    """

    reason: RequeueReason
    ticket: Ticket | None = None
    progress: Ticket | None = None


@dataclass(frozen=True, slots=True)
class Malformed(RequestMessage):
    """An invalid message about a request; `problem` says what is wrong with it."""

    problem: str


RequestEvent = Malformed | Reserved | Began | Prefilled | Generated | Failed | Requeued


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A worker's load. `stalled`: the worker waits for its block store."""

    load: Load
    draining: bool = False
    stalled: bool = False


@dataclass(frozen=True, slots=True)
class DrainNotice:
    """The worker drains: it takes no new requests, and `num_running` requests still run."""

    num_running: int = 0


@dataclass(frozen=True, slots=True)
class Step:
    """All outputs of one decode step for one gateway."""

    outputs: tuple[Generated, ...]


Event = RequestEvent | LoadReport | DrainNotice
"""The events that a gateway reads from a worker. It gets the outputs of a `Step` one by one."""

WorkerEvent = Step | Began | Prefilled | Reserved | Failed | Requeued | DrainNotice
"""The events that a worker's logic sends to a gateway."""
