"""One request at a decode worker."""

from dataclasses import dataclass
from enum import Enum, auto

from services.common.ticket import Ticket
from services.worker.events import Ending, Session


class State(Enum):
    """RESERVED (slots only) -> CLAIMING (asks the store for the holder) -> RUNNING -> ENDED."""

    RESERVED = auto()
    CLAIMING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(eq=False, slots=True)
class Job:
    """`ticket` is there once it is admitted; its epoch is the claim's once it runs."""

    session: Session
    request_id: str
    attempt: int
    num_sequences: int
    state: State = State.RESERVED
    ticket: Ticket | None = None
    ending: Ending | None = None

    @property
    def key(self) -> tuple[int, str, int]:
        """(gateway, request, attempt)."""
        return id(self.session), self.request_id, self.attempt
