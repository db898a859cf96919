"""Both roles in one engine, for prefill and decode on one GPU: a step that decodes also computes
chunks of prompts, and reads the weights once for both.

A request goes the same way as between two workers: its ticket is detached in the store and claimed
again, and its blocks stay where they are.
"""

from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from blockstore.registry import Load
from services.engine.messages import StepOutcome
from services.protocol.messages import Abort, Command, Submit
from services.protocol.worker_stream import DECODE, PREFILL
from services.worker.pool_engine import PoolEngine
from services.worker.requests.events import Session
from services.worker.roles.decode import Decode
from services.worker.roles.prefill import Prefill
from services.worker.roles.role import Role


class Mixed(Role):
    """A decode worker that prefills, too. Gateways open a stream for each role, so each session has
    requests in one role only."""

    streams = (PREFILL, DECODE)

    def __init__(self, worker: PoolEngine) -> None:
        super().__init__(worker)
        self.prefill, self.decode = Prefill(worker), Decode(worker)
        self._both: tuple[Role, Role] = self.prefill, self.decode

    def execute(self, session: Session, command: Command) -> None:
        match command:
            case Submit():
                self.prefill.execute(session, command)
            case Abort(request_id, attempt, index):
                self.abort(session, request_id, attempt, index)
            case _:
                self.decode.execute(session, command)

    def abort(
        self, session: Session, request_id: str, attempt: int, index: int | None = None
    ) -> None:
        for role in self._both:
            role.abort(session, request_id, attempt, index)

    def close(self, session: Session) -> None:
        for role in self._both:
            role.close(session)

    @property
    def num_jobs(self) -> int:
        return sum(role.num_jobs for role in self._both)

    @property
    def num_busy(self) -> int:
        return sum(role.num_busy for role in self._both)

    def load(self) -> Load:
        prefill, decode = self.prefill.load(), self.decode.load()
        return replace(
            decode,
            num_running=prefill.num_running + decode.num_running,
            num_waiting=prefill.num_waiting,
            num_pending_tokens=prefill.num_pending_tokens,
        )

    def on_drain(self) -> None:
        for role in self._both:
            role.on_drain()

    def loops(self) -> Iterable[Coroutine[Any, Any, None]]:
        return chain.from_iterable(role.loops() for role in self._both)

    def requeue_all(self) -> None:
        for role in self._both:
            role.requeue_all()

    def preempt(self, holder_ids: Sequence[str]) -> None:
        """Preempt these holders. The prefill role may not have heard yet that a detached ticket of
        its own was claimed here."""
        self.decode.preempt(holder_ids)
        others = [each for each in holder_ids if each not in self.decode.running]
        self.prefill.preempt(others)

    def on_outcome(self, outcome: StepOutcome) -> None:
        """Give each role what the step did with its groups."""
        prefilling = frozenset(self.prefill.running)
        if own := _part(outcome, prefilling.__contains__):
            self.prefill.on_outcome(own)
        if own := _part(outcome, lambda key: key not in prefilling):
            self.decode.on_outcome(own)


def _part(outcome: StepOutcome, is_own: Callable[[str], bool]) -> StepOutcome | None:
    """The groups of an outcome for whose key `is_own` holds; None if there are none."""
    part = StepOutcome(
        tuple(advance for advance in outcome.advances if is_own(advance.key)),
        tuple(failed for failed in outcome.failed if is_own(failed.key)),
        tuple(removed for removed in outcome.removed if is_own(removed.key)),
    )
    return part if part.has_results else None
