"""One request at a decode worker."""

from dataclasses import dataclass
from enum import Enum, auto

from services.common.ticket import Ticket
from services.worker.events import Ending, Session


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
    """`ticket` is there once it is admitted; its epoch is the claim's once it runs. `ending`: set
    once it is to end early, or to come to rest."""

    session: Session
    request_id: str
    attempt: int
    num_sequences: int
    state: State = State.RESERVED
    ticket: Ticket | None = None
    ending: Ending | None = None

    @property
    def num_slots(self) -> int:
        """What it keeps from others."""
        return 0 if self.state in (State.SWAPPING, State.AT_REST) else self.num_sequences

    @property
    def key(self) -> tuple[int, str, int]:
        """(gateway, request, attempt)."""
        return id(self.session), self.request_id, self.attempt
