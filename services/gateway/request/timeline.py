"""The timeline of a request: which phase it was in, from when on, and at which worker."""

import time
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from services.gateway.request.trace import RequestTrace


class Phase(Enum):
    WAITING = "waiting"
    """In the queue, for slots, or at a prefill worker that has not begun: for its turn or for
    blocks."""
    PREFILL = "prefill"
    HAND_OFF = "hand-off"
    """A decode worker has been sent the ticket and has not answered with a token."""
    DECODE = "decode"
    MOVING = "moving"
    """As HAND_OFF, for a request that moves between decode workers."""
    PREEMPTED = "preempted"
    """In the queue again, because others needed its blocks."""
    LOST = "lost"
    """In the queue again, because a worker was lost or sent something impossible."""


_MAX_SPANS = 64
"""The first phases of a request that is preempted again and again are forgotten."""

Span = tuple[Phase, int, str]


class Timeline:
    """The phases of one request as `spans`: phase, its begin in Unix ms, id of the worker or "".

    `trace` is told each phase too; None: the request is not traced.
    """

    def __init__(self, trace: "RequestTrace | None" = None) -> None:
        self._trace = trace
        self.spans: list[Span] = []
        self.ended_ms: int | None = None
        self.phase = Phase.WAITING
        self.enter(Phase.WAITING)

    def enter(self, phase: Phase, worker_id: str = "") -> None:
        self.phase = phase
        self.spans.append((phase, now_ms(), worker_id))
        if len(self.spans) > _MAX_SPANS:
            del self.spans[0]
        if self._trace is not None:
            self._trace.enter(phase, worker_id)

    def end(self) -> None:
        self.ended_ms = now_ms()


def now_ms() -> int:
    return time.time_ns() // 1_000_000
