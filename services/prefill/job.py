"""One request at a prefill worker."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from blockstore.records import Allocation, PrefixHash
from services.engine.sequences.block_keys import Begun, BlockKeys, num_tokens_of
from services.protocol.logprobs import Logprobs
from services.protocol.ticket import BeamState, Ticket, TicketSequence
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
    """`contents`: of its blocks, once they are filled. `follows`: a prefix that somebody else here
    is computing. `outputs`: drawn so far. `ending`: set once it is to end early. `suspect`: a
    worker has died over it. `num_prompt_logprobs`: tell those of the prompt, with so many of the
    likeliest tokens; None: do not. They come chunk by chunk, into `prompt_logprobs`."""

    session: Session
    ticket: Ticket
    contents: BlockKeys
    suspect: bool = False
    state: State = State.WAITING
    follows: PrefixHash | None = None
    allocation: Allocation | None = None
    ending: Ending | None = None
    num_prompt_logprobs: int | None = None
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    outputs: list[Output | Found] = field(default_factory=list)
    num_tokens: int = field(init=False)
    num_uncomputed: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_tokens = self.num_uncomputed = num_tokens_of(self.ticket)

    @property
    def key(self) -> tuple[int, str, int]:
        """(gateway, request, attempt)."""
        return id(self.session), *self.ticket.key

    @property
    def hashes(self) -> Sequence[PrefixHash]:
        """Of the full blocks with which all its sequences begin."""
        return self.contents.trunk.hashes

    @property
    def chains(self) -> tuple[Sequence[PrefixHash], Sequence[Sequence[PrefixHash]]]:
        """What it looks for in the cache. Whose prompt's logprobs are asked for computes all."""
        shared, behind = self.contents.chains
        return shared, behind if self.num_prompt_logprobs is None else ()

    def begun(self) -> list[Begun]:
        """Where its sequences begin with what was cached."""
        assert self.allocation is not None
        begun = self.contents.begun(self.allocation.cached(*self.chains))
        if self.num_prompt_logprobs is None:
            return begun
        return [replace(where, num_tokens=0) for where in begun]

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
