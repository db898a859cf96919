"""One request at a prefill worker."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from blockstore.store import Allocation, PrefixHash
from services.common.logprobs import Logprobs
from services.common.ticket import FinishReason, Ticket, TicketSequence
from services.worker.events import Ending, Output, Session


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
    """`follows`: a prefix that somebody else here is computing. `ending`: set once it is to end
    early. `num_prompt_logprobs`: tell those of the prompt, with so many of the likeliest tokens;
    None: do not. They come chunk by chunk, into `prompt_logprobs`."""

    session: Session
    ticket: Ticket
    hashes: Sequence[PrefixHash]
    state: State = State.WAITING
    follows: PrefixHash | None = None
    allocation: Allocation | None = None
    ending: Ending | None = None
    num_prompt_logprobs: int | None = None
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    num_uncomputed: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_uncomputed = len(self.tokens)

    @property
    def key(self) -> tuple[int, str, int]:
        """(gateway, request, attempt)."""
        return id(self.session), *self.ticket.key

    @property
    def tokens(self) -> tuple[int, ...]:
        return self.ticket.prompt_token_ids + self.ticket.sequences[0].token_ids

    def issued(self, token: int, prefill_ns_per_token: int) -> Ticket:
        """The ticket with blocks and the token just drawn, at rest (epoch 2)."""
        assert self.allocation is not None
        old = self.ticket.sequences[0]
        sequence = TicketSequence(
            index=old.index,
            token_ids=(*old.token_ids, token),
            block_ids=self.allocation.block_ids,
            num_computed_tokens=len(self.tokens),
        )
        return replace(
            self.ticket,
            holder_epoch=self.allocation.epoch + 1,
            sequences=(sequence,),
            swapped=None,
            prefill_ns_per_token=prefill_ns_per_token,
        )

    def finished(self) -> Ticket:
        """The ticket of a request that is over: no sequences, no blocks."""
        return replace(self.ticket, holder_epoch=0, sequences=(), swapped=None)

    def output(self, token: int, finish: FinishReason | None, logprobs: Logprobs | None) -> Output:
        """The token just drawn."""
        index, position = self.ticket.sequences[0].index, len(self.tokens)
        return Output(*self.ticket.key, index, position, token, finish, logprobs)
