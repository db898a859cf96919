"""The requests at a worker, and their time limits."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, TypeVar

from services.engine.batch import LoadedAdapter
from services.protocol.ticket import Ticket
from services.worker.requests.events import Ending, Session
from services.worker.requests.trace import JobTrace


class State(Enum):
    """Where a request stands at a worker. Every state may go to ENDED.

    prefill   LOADING -> WAITING ------------> RUNNING ----------------> DETACHED -> ENDED
                            `--> FETCHING -------^
    decode    CLAIMING ----------------------> RUNNING ----------------> DETACHED -> ENDED
                                                  `-----> SWAPPING ---------^
    """

    LOADING = auto()
    """Its adapter is being read."""
    WAITING = auto()
    """It waits for blocks."""
    FETCHING = auto()
    """Its KV is being copied back from the swap pool."""
    CLAIMING = auto()
    """Its adapter is being read, or the worker asks the store for its holder."""
    RUNNING = auto()
    """The engine has it."""
    SWAPPING = auto()
    """It is preempted, and its KV is being copied to the swap pool."""
    DETACHED = auto()
    """Its ticket waits for a claim, with blocks in the worker's pool or in the swap pool."""
    ENDED = auto()


Key = tuple[int, str, int]
"""(gateway session, request id, attempt)."""


@dataclass(eq=False, slots=True)
class Job:
    """One attempt of a request."""

    session: Session
    ticket: Ticket
    state: State = State.LOADING
    ending: Ending | None = None
    """Why the request ends early or is detached; None if it does not."""
    trace: JobTrace = field(default_factory=JobTrace)
    adapter: LoadedAdapter | None = None
    """The loaded adapter, kept while the job is here."""

    @property
    def key(self) -> Key:
        return id(self.session), *self.ticket.key


J = TypeVar("J", bound=Job)


class Jobs(Generic[J]):
    """The jobs of a worker in a role. `end(job, ending)` is called when a time limit of a job
    expires. `added` is set when a job is added."""

    def __init__(self, end: Callable[[J, Ending], None], added: asyncio.Event) -> None:
        self._end = end
        self._added = added
        self._jobs: dict[Key, J] = {}
        self._timers: dict[J, list[asyncio.TimerHandle]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[J]:
        """Iterates over a copy: the caller may end jobs while it iterates."""
        return iter(tuple(self._jobs.values()))

    def get(self, session: Session, request_id: str, attempt: int) -> J | None:
        return self._jobs.get((id(session), request_id, attempt))

    def of(self, session: Session) -> Iterator[J]:
        return (job for job in self if job.session is session)

    def detached(self, holder_id: str) -> J | None:
        """The job whose ticket waits for a claim of this holder in the worker's own pool."""
        for job in self._jobs.values():
            is_detached = job.state is State.DETACHED and job.ticket.swapped is None
            if is_detached and job.ticket.holder_id == holder_id:
                return job
        return None

    def add(self, job: J) -> None:
        self._jobs[job.key] = job
        self._added.set()

    def remove(self, job: J) -> None:
        """Remove a job and cancel its timers. No error if it is not here."""
        self._jobs.pop(job.key, None)
        for timer in self._timers.pop(job, ()):
            timer.cancel()

    def end_after(self, delay_s: float, job: J, ending: Ending) -> None:
        timer = asyncio.get_running_loop().call_later(delay_s, self._end, job, ending)
        self._timers.setdefault(job, []).append(timer)
