"""One request at a decode worker."""

from dataclasses import dataclass, field, replace
from enum import Enum, auto

from services.protocol.ticket import Ticket
from services.worker.events import HANDED_OVER, Ending, Session


class State(Enum):
    """RESERVED (slots only) -> CLAIMING (asks the store for the holder) -> RUNNING -> ENDED, or
    RUNNING -> AT_REST (a ticket with blocks, for somebody else to claim) -> ENDED. What gives way
    may be SWAPPING before: its KV is copied to the colder pool, and rests there."""

    RESERVED = auto()
    CLAIMING = auto()
    RUNNING = auto()
    SWAPPING = auto()
    AT_REST = auto()
    ENDED = auto()


@dataclass(eq=False, slots=True)
class Job:
    """`num_sequences`: slots that were reserved. `ticket` is there once it is admitted; its epoch
    is the claim's once it runs. `living`: the indices of its sequences that have not ended.
    `suspect`: a worker has died over it. `ending`: set once it is to end early, or to come to
    rest."""

    session: Session
    request_id: str
    attempt: int
    num_sequences: int
    state: State = State.RESERVED
    ticket: Ticket | None = None
    living: set[int] = field(default_factory=set)
    suspect: bool = False
    ending: Ending | None = None

    @property
    def claim(self) -> tuple[str, int] | None:
        """(holder, its epoch at rest) of the blocks that it writes, or asks for."""
        if self.ticket is None or self.state not in (State.CLAIMING, State.RUNNING):
            return None
        is_claimed = self.state is State.RUNNING
        return self.ticket.holder_id, self.ticket.holder_epoch - is_claimed

    @property
    def num_slots(self) -> int:
        """What it keeps from others."""
        if self.state in (State.SWAPPING, State.AT_REST):
            return 0
        if self.ticket is None:
            return self.num_sequences
        return self.ticket.width if self.searches else len(self.living)

    @property
    def searches(self) -> bool:
        return self.ticket is not None and self.ticket.sampling.beam is not None

    @property
    def has_blocks(self) -> bool:
        """Whether it can be kept for another gateway: neither swapped out, nor just about to."""
        swapped = self.ticket is not None and self.ticket.swapped is not None
        return not swapped and self.state in (State.CLAIMING, State.RUNNING, State.AT_REST)

    def goes_on_as(self, wanted: Ticket) -> bool:
        """Whether it is what somebody wants who knows its prompt, its parameters and its tokens.
        (Of what runs, only the tokens that came with it are known here.)"""
        ticket = self.ticket
        if ticket is None or not self.has_blocks or self.ending not in (None, HANDED_OVER):
            return False
        ours = {state.index: state.token_ids for state in living_of(self).sequences}
        return (
            ticket.request_id == wanted.request_id
            and ticket.root_hash == wanted.root_hash
            and ticket.prompt_token_ids == wanted.prompt_token_ids
            and ticket.sampling.draws_like(wanted.sampling)
            and all(
                state.index in ours and _agree(ours[state.index], state.token_ids)
                for state in wanted.sequences
            )
        )

    @property
    def key(self) -> tuple[int, str, int]:
        """(gateway, request, attempt)."""
        return id(self.session), self.request_id, self.attempt


def ticket_of(job: Job) -> Ticket:
    """Of one that is admitted."""
    assert job.ticket is not None
    return job.ticket


def living_of(job: Job) -> Ticket:
    """Its ticket without the sequences that have ended since."""
    ticket = ticket_of(job)
    return replace(ticket, sequences=tuple(s for s in ticket.sequences if s.index in job.living))


def _agree(these: tuple[int, ...], those: tuple[int, ...]) -> bool:
    """Equal as far as both go."""
    length = min(len(these), len(those))
    return these[:length] == those[:length]
