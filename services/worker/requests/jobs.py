"""The requests at a worker, and their time limits."""

import asyncio
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, Protocol, TypeVar

from services.worker.requests.events import Ending, Session

Key = tuple[int, str, int]
"""(gateway session, request id, attempt)."""


class Job(Hashable, Protocol):
    session: Session

    @property
    def key(self) -> Key: ...


J = TypeVar("J", bound=Job)


class Jobs(Generic[J]):
    """The jobs of a worker. `end(job, ending)` is called when a time limit of a job expires."""

    def __init__(self, end: Callable[[J, Ending], None]) -> None:
        self._end = end
        self.added = asyncio.Event()
        """Set when a job is added."""
        self._jobs: dict[Key, J] = {}
        self._timers: dict[J, list[asyncio.TimerHandle]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[J]:
        """Iterates over a copy: the caller may end jobs while it iterates."""
        return iter(tuple(self._jobs.values()))

    def __contains__(self, job: J) -> bool:
        """Whether a job with the same key is here."""
        return job.key in self._jobs

    def get(self, session: Session, request_id: str, attempt: int) -> J | None:
        return self._jobs.get((id(session), request_id, attempt))

    def of(self, session: Session) -> Iterator[J]:
        return (job for job in self if job.session is session)

    def add(self, job: J) -> None:
        self._jobs[job.key] = job
        self.added.set()

    def remove(self, job: J) -> None:
        """Remove a job and cancel its timers. No error if it is not here."""
        self._jobs.pop(job.key, None)
        for timer in self._timers.pop(job, ()):
            timer.cancel()

    def end_after(self, delay_s: float, job: J, ending: Ending) -> None:
        timer = asyncio.get_running_loop().call_later(delay_s, self._end, job, ending)
        self._timers.setdefault(job, []).append(timer)
