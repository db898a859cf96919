"""The messages between a gateway and its workers: commands, and the events that answer them.

`services.protocol.event_codec` and `services.protocol.command_codec` convert them to protobuf
messages and back.
"""

from dataclasses import dataclass
from enum import Enum

from blockstore.registry import Load
from services.protocol.logprobs import LogprobColumns, Logprobs
from services.protocol.ticket import FinishReason, Ticket, TicketState


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


class PoolingMode(Enum):
    """Which final states of a prompt become its embedding."""

    LAST = "last"  # the state of the last token
    MEAN = "mean"  # the mean of the states of all tokens


@dataclass(frozen=True, slots=True)
class Pooling:
    """How a prompt becomes an embedding: the first `dimensions` values of the pooled final state,
    scaled to length 1."""

    mode: PoolingMode
    dimensions: int


@dataclass(frozen=True, slots=True)
class Submit:
    """Sends a ticket without blocks to a prefill worker, to be computed."""

    ticket: Ticket
    prompt_logprobs: int | None = None
    """How many of the likeliest tokens to return with each logprob of the prompt; None returns no
    logprobs of the prompt."""
    pooling: Pooling | None = None
    """How to make the embedding of the prompt; then no token is drawn."""


@dataclass(frozen=True, slots=True)
class Admit:
    """Sends a ticket with blocks to a decode worker, which claims it and continues it."""

    ticket: Ticket
    """As in `Submit`."""


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
class Resume(RequestMessage):
    """Asks a decode worker for a request that another gateway left. The worker detaches the request
    and answers with `Requeued`, without a ticket if it does not have the request."""

    digest: bytes
    """`Ticket.digest` of the request."""


Command = Reserve | Submit | Admit | Abort | HandOver | Resume


@dataclass(frozen=True, slots=True)
class Reserved(RequestMessage):
    """A decode worker's answer to `Reserve`."""

    granted: bool


@dataclass(frozen=True, slots=True)
class Began(RequestMessage):
    """The worker begins to compute the request. It sends this before it begins, so that a crash can
    be attributed."""

    num_cached_tokens: int = 0
    """The prompt tokens that a prefill worker found in the cache."""


@dataclass(frozen=True, slots=True)
class AwaitsBlocks(RequestMessage):
    """The pool has too few blocks for the request, which waits for them at its prefill worker."""

    num_needed: int = 0
    """The new blocks that it needs; 0 if an earlier request already waits for blocks."""
    num_available: int = 0


@dataclass(frozen=True, slots=True)
class Generated(RequestMessage):
    """The output of a prefill or of one decode step for one sequence."""

    index: int
    position: int
    """The position of the first token, counted from the start of the prompt."""
    token_ids: tuple[int, ...] = ()
    """Empty while a beam search runs."""
    finish_reason: FinishReason | None = None
    logprobs: tuple[Logprobs, ...] = ()
    """The logprobs of each token, if the request asked for them."""
    score: float | None = None
    """The score of a hypothesis that a beam search found."""
    num_drafts: int = 0
    """How many drafts the step verified. `num_accepted` of them are among its tokens."""
    num_accepted: int = 0


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prefill worker has computed a ticket."""

    ticket: TicketState
    """The sequences that continue, with their blocks; it has no sequence if all have ended."""
    outputs: tuple[Generated, ...]
    """The next token of each submitted sequence."""
    prompt_logprobs: LogprobColumns | None = None
    """The logprobs of each token of the prompt but the first, if the request asked for them and the
    prompt has such tokens."""
    embedding: tuple[float, ...] = ()
    """The embedding of the prompt, if the request asked for it. Then it has no outputs."""

    @property
    def request_id(self) -> str:
        return self.ticket.request_id

    @property
    def attempt(self) -> int:
        return self.ticket.attempt


@dataclass(frozen=True, slots=True)
class Failed(RequestMessage):
    """A request ended at a worker with a domain error of this code."""

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
    """A worker returns a request."""

    reason: RequeueReason
    ticket: TicketState | None = None
    """A detached ticket: the worker keeps its blocks, in the pool or swapped out, until another
    worker claims them. Or the beams of a search, without blocks. None if the gateway builds the
    next ticket from the tokens received."""


RequestEvent = Reserved | AwaitsBlocks | Began | Prefilled | Generated | Failed | Requeued


@dataclass(frozen=True, slots=True)
class LoadReport:
    """A worker's load."""

    load: Load
    draining: bool = False


@dataclass(frozen=True, slots=True)
class DrainNotice:
    """The worker drains: it takes no new requests, and `num_running` requests still run."""

    num_running: int = 0
    has_new_weights: bool = False
    """Whether this answers a reload, and the worker has read other weights than it serves."""


@dataclass(frozen=True, slots=True)
class Step:
    """All outputs of one decode step for one gateway."""

    outputs: tuple[Generated, ...]


Event = RequestEvent | LoadReport | DrainNotice
"""The events that a gateway reads from a worker. It gets the outputs of a `Step` one by one."""

WorkerEvent = Step | AwaitsBlocks | Began | Prefilled | Reserved | Failed | Requeued | DrainNotice
"""The events that a worker's logic sends to a gateway."""
