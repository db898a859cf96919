"""The timeline of a request: its events in order, the time that it spent in each phase, and the
figures that follow from them."""

import time
from collections import defaultdict
from typing import TYPE_CHECKING

from quire.types import RequestMetrics
from quire.worker_names import worker_name
from services.gateway.request.events import Entered, Event, Phase, Placed

if TYPE_CHECKING:
    from services.gateway.output.output import RequestStats
    from services.gateway.request.trace import RequestTrace

_MAX_EVENTS = 64
"""The first events of a request that is preempted again and again are forgotten."""

Span = tuple[Phase, int, str]


class Timeline:
    """`events` are the last events, each with the seconds since the request's arrival.

    `trace` is told each phase too; None: the request is not traced. The request arrived `age_s`
    seconds ago.
    """

    def __init__(self, trace: "RequestTrace | None" = None, age_s: float = 0.0) -> None:
        self._trace = trace
        self._arrived_at = time.monotonic() - age_s
        self.arrived_ms = now_ms() - round(age_s * 1000)
        """In Unix time, as all times with this suffix."""
        self.num_queued = 0
        """The requests that waited for the model when this one arrived."""
        self.events: list[tuple[float, Event]] = []
        self.num_forgotten = 0
        self.ended_s: float | None = None
        """None while the request runs."""
        self.placement: list[str] = []
        """The names of the workers that had the request, in order."""
        self.first_prefill_s: float | None = None
        self._spent_s: defaultdict[Phase, float] = defaultdict(float)
        self._since_s = 0.0
        self.phase = Phase.WAITING
        self._enter(Phase.WAITING, "", 0.0)

    def enter(self, phase: Phase, worker_id: str = "") -> None:
        self._enter(phase, worker_id, self.age_s)

    def _enter(self, phase: Phase, worker_id: str, at_s: float) -> None:
        self._spent_s[self.phase] += at_s - self._since_s
        self.phase, self._since_s = phase, at_s
        if phase is Phase.PREFILL and self.first_prefill_s is None:
            self.first_prefill_s = at_s
        name = worker_name(worker_id)
        if name and self.placement[-1:] != [name]:
            self.placement = [*self.placement[: _MAX_EVENTS - 1], name]
        self.note(Entered(phase, worker_id), at_s)
        if self._trace is not None:
            self._trace.enter(phase, worker_id)

    def note(self, event: Event, at_s: float | None = None) -> None:
        self.events.append((self.age_s if at_s is None else at_s, event))
        if len(self.events) > _MAX_EVENTS:
            del self.events[0]
            self.num_forgotten += 1

    def ends_with(self, kind: type[Event]) -> bool:
        return isinstance(self.events[-1][1], kind)

    def end(self) -> None:
        self.ended_s, self._trace = self.age_s, None
        self._spent_s[self.phase] += self.ended_s - self._since_s
        self._since_s = self.ended_s

    @property
    def age_s(self) -> float:
        """The seconds from the arrival to now, or to the end."""
        return time.monotonic() - self._arrived_at if self.ended_s is None else self.ended_s

    @property
    def spans(self) -> list[Span]:
        """The phases in order: phase, its begin, id of the worker or ""."""
        entered = ((at_s, each) for at_s, each in self.events if isinstance(each, Entered))
        return [(each.phase, self.time_ms(at_s), each.worker_id) for at_s, each in entered]

    @property
    def placed(self) -> Placed | None:
        """Where the request went first, as far as that is not forgotten."""
        return next((event for _, event in self.events if isinstance(event, Placed)), None)

    def time_ms(self, at_s: float) -> int:
        return self.arrived_ms + round(at_s * 1000)

    def metrics(self, stats: "RequestStats", num_sequences: int = 1) -> RequestMetrics:
        """The figures so far. The four durations add up to the time since the arrival."""
        spent = {phase: self._spent_s[phase] for phase in Phase}
        spent[self.phase] += self.age_s - self._since_s
        begun_s = self.first_prefill_s or 0.0
        generated_s, num_tokens = stats.generation_time_s, stats.num_generated_tokens
        num_gaps = num_tokens - 1 if num_sequences == 1 else 0
        return RequestMetrics(
            queue_ms=_ms(spent[Phase.WAITING] + spent[Phase.PREEMPTED] + spent[Phase.LOST]),
            placement=tuple(self.placement),
            prefill_ms=_ms(spent[Phase.PREFILL]),
            handoff_ms=_ms(spent[Phase.HAND_OFF] + spent[Phase.MOVING]),
            decode_ms=_ms(spent[Phase.DECODE]),
            cached_tokens=stats.num_cached_tokens if stats.reports_cached else None,
            preemptions=stats.num_preemptions,
            moves=stats.num_moves,
            queue_time_ms=_ms(begun_s),
            time_to_first_token_ms=_ms(max(0.0, stats.time_to_first_token_s - begun_s)),
            generation_time_ms=_ms(generated_s),
            mean_itl_ms=_ms(generated_s / num_gaps) if num_gaps > 0 else None,
            tokens_per_second=round(num_tokens / generated_s, 3) if generated_s else None,
        )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


def now_ms() -> int:
    return time.time_ns() // 1_000_000
