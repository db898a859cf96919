"""One request at a prefill worker."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from blockstore.store import Allocation, PrefixHash
from services.common.logprobs import Logprobs
from services.common.ticket import BeamState, Ticket, TicketSequence
from services.engine.group import num_tokens_of, shared_tokens
from services.worker.events import Ending, Found, Output, Session


class State(Enum):
    """WAITING (no blocks) -> COMPUTING (in the engine) -> ISSUED (a ticket at rest) -> ENDED; one
    that was swapped out is FETCHING its KV before it computes the rest."""

    WAITING = auto()
    FETCHING = auto()
    COMPUTING = auto()
    ISSUED = auto()
    ENDED = auto()


@dataclass(eq=False, slots=True)
class Job:
    """`tokens`: with which all its sequences begin, `hashes` of their full blocks. `follows`: a
    prefix that somebody else here is computing. `outputs`: drawn so far. `ending`: set once it is
    to end early. `suspect`: a worker has died over it. `num_prompt_logprobs`: tell those of the
    prompt, with so many of the likeliest tokens; None: do not. They come chunk by chunk, into
    `prompt_logprobs`."""

    session: Session
    ticket: Ticket
    hashes: Sequence[PrefixHash]
    suspect: bool = False
    state: State = State.WAITING
    follows: PrefixHash | None = None
    allocation: Allocation | None = None
    ending: Ending | None = None
    num_prompt_logprobs: int | None = None
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    outputs: list[Output | Found] = field(default_factory=list)
    tokens: tuple[int, ...] = field(init=False)
    num_tokens: int = field(init=False)
    num_uncomputed: int = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = shared_tokens(self.ticket)
        self.num_tokens = self.num_uncomputed = num_tokens_of(self.ticket)

    @property
    def key(self) -> tuple[int, str, int]:
        """(gateway, request, attempt)."""
        return id(self.session), *self.ticket.key

    def issued(
        self,
        left: tuple[TicketSequence, ...],
        beams: BeamState | None,
        prefill_ns_per_token: int,
    ) -> Ticket:
        """The ticket of those that go on, with blocks and the tokens just drawn, at rest (epoch
        2)."""
        assert self.allocation is not None
        return replace(
            self.ticket,
            holder_epoch=self.allocation.epoch + 1,
            sequences=left,
            swapped=None,
            beams=beams,
            prefill_ns_per_token=prefill_ns_per_token,
        )

    def finished(self) -> Ticket:
        """The ticket of a request whose sequences have all ended."""
        return replace(self.ticket, holder_epoch=0, sequences=(), swapped=None, beams=None)
