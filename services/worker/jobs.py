"""The requests that a worker has, and when their time is over."""

import asyncio
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, Protocol, TypeVar

from services.worker.events import Ending, Session

Key = tuple[int, str, int]
"""(gateway, request, attempt)."""


class Job(Hashable, Protocol):
    session: Session

    @property
    def key(self) -> Key: ...


J = TypeVar("J", bound=Job)


class Jobs(Generic[J]):
    """`end(job, ending)` is called for those whose time is over."""

    def __init__(self, end: Callable[[J, Ending], None]) -> None:
        self._end = end
        self.came = asyncio.Event()
        """Set whenever there is one more."""
        self._jobs: dict[Key, J] = {}
        self._timers: dict[J, list[asyncio.TimerHandle]] = {}

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[J]:
        """Those of now; whoever walks through them may end them."""
        return iter(tuple(self._jobs.values()))

    def __contains__(self, job: J) -> bool:
        """Whether its key is taken."""
        return job.key in self._jobs

    def get(self, session: Session, request_id: str, attempt: int) -> J | None:
        return self._jobs.get((id(session), request_id, attempt))

    def of(self, session: Session) -> Iterator[J]:
        return (job for job in self if job.session is session)

    def add(self, job: J) -> None:
        self._jobs[job.key] = job
        self.came.set()

    def remove(self, job: J) -> None:
        """With its timers. Who is not there is no error."""
        self._jobs.pop(job.key, None)
        for timer in self._timers.pop(job, ()):
            timer.cancel()

    def end_after(self, delay_s: float, job: J, ending: Ending) -> None:
        timer = asyncio.get_running_loop().call_later(delay_s, self._end, job, ending)
        self._timers.setdefault(job, []).append(timer)
