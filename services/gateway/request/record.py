"""The record of a request: its events in order, the time that it spent in each phase, and the
figures that follow from them.

The answer's figures, the story of `quire explain`, the dashboard's rows and the trace are made of
it. A record has no prompt and no answer.
"""

import time
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from quire.types import RequestMetrics
from quire.worker_names import worker_name
from services.gateway.access.caller import Caller
from services.gateway.request.events import Computed, Entered, Event, Phase, Placed
from services.gateway.request.status import CANCELLED
from services.protocol.ticket import FinishReason
from services.runtime.rpc.error_table import INTERNAL_CODE, code_of

if TYPE_CHECKING:
    from services.gateway.output.output import RequestStats
    from services.gateway.request.trace import RequestTrace

_MAX_EVENTS = 64
"""The first events of a request that is preempted again and again are forgotten."""
MAX_REASON_CHARS = 400
HASH_BYTES = 8
_RECORD_BYTES, _EVENT_BYTES, _ITEM_BYTES = 2048, 384, 448
"""Upper bounds of the memory of a record, of one event, and of one item that an event lists."""

Span = tuple[Phase, int, str]


def now_ms() -> int:
    """Unix time, as all times with this suffix."""
    return time.time_ns() // 1_000_000


class Root(NamedTuple):
    """The values that two requests must share, beside the tokens, to share cached blocks."""

    cache_salt: int
    """The hash of the cache salt, with the tenant."""
    adapter: str
    fingerprint: str
    pool: str


@dataclass(eq=False, slots=True)
class Record:
    """The record of a request that runs or has ended."""

    request_id: str
    """The client's id."""
    caller: Caller
    stats: "RequestStats | None" = None
    """None if the request was refused before it was queued."""
    trace: "RequestTrace | None" = None
    """The trace, which gets each phase too; None if the request is not traced, or has ended."""
    order: int = 0
    """See `queue_order`."""
    model: str = ""
    num_sequences: int = 1
    cache_salt: int = 0
    """See `Root`."""
    adapter: str = ""
    """The digest of the adapter."""
    hashes: bytes = b""
    """8 bytes for each full block of the prompt and of the first sequence; empty while it runs."""
    outcome: str = ""
    """A finish reason, an error code, or `cancelled`; empty while the request runs."""
    reason: str = ""
    """The text of the error."""
    arrived_at: float = field(default_factory=time.monotonic)
    arrived_ms: int = field(default_factory=now_ms)
    num_queued: int = 0
    """The requests that waited for the model when this one arrived."""
    phase: Phase = Phase.WAITING
    events: list[tuple[float, Event]] = field(
        default_factory=lambda: [(0.0, Entered(Phase.WAITING))]
    )
    """The last events, each with the seconds since the request's arrival."""
    num_forgotten: int = 0
    ended_s: float | None = None
    """The seconds from the request's arrival to its end; None while it runs."""
    placement: list[str] = field(default_factory=list)
    """The names of the workers that had the request, in order."""
    first_prefill_s: float | None = None
    _spent_s: defaultdict[Phase, float] = field(default_factory=lambda: defaultdict(float))
    _since_s: float = 0.0

    def __post_init__(self) -> None:
        if self.trace is not None:
            self.trace.enter(self.phase, "")

    # ── what happens ─────────────────────────────────────────────────────────────────────────────

    def enter(self, phase: Phase, worker_id: str = "") -> None:
        """A phase begins, at this worker if it has one."""
        at_s = self.age_s
        self._spent_s[self.phase] += at_s - self._since_s
        self.phase, self._since_s = phase, at_s
        if phase is Phase.PREFILL and self.first_prefill_s is None:
            self.first_prefill_s = at_s
        name = worker_name(worker_id)
        if name and self.placement[-1:] != [name]:
            self.placement = [*self.placement[: _MAX_EVENTS - 1], name]
        self.note(Entered(phase, worker_id))
        if self.trace is not None:
            self.trace.enter(phase, worker_id)

    def note(self, event: Event) -> None:
        self.events.append((self.age_s, event))
        if len(self.events) > _MAX_EVENTS:
            del self.events[0]
            self.num_forgotten += 1

    def end(self, finish: FinishReason | None, error: Exception | None) -> None:
        """The request has finished, or failed, or neither: its client has left."""
        self.ended_s, self.trace = self.age_s, None
        self._spent_s[self.phase] += self.ended_s - self._since_s
        self._since_s = self.ended_s
        code = CANCELLED if error is None else code_of(error)
        self.outcome = code if finish is None else finish.value
        if error is not None and code != INTERNAL_CODE:
            self.reason = str(error)[:MAX_REASON_CHARS]

    # ── what follows ─────────────────────────────────────────────────────────────────────────────

    def ends_with(self, kind: type[Event]) -> bool:
        return isinstance(self.events[-1][1], kind)

    @property
    def age_s(self) -> float:
        """The seconds from the arrival to now, or to the end."""
        return time.monotonic() - self.arrived_at if self.ended_s is None else self.ended_s

    @property
    def spans(self) -> list[Span]:
        """The phases in order: phase, its begin, id of the worker or ""."""
        entered = ((at_s, each) for at_s, each in self.events if isinstance(each, Entered))
        return [(each.phase, self.time_ms(at_s), each.worker_id) for at_s, each in entered]

    @property
    def placed(self) -> Placed | None:
        """Where the request went first, as far as that is not forgotten."""
        return next((event for _, event in self.events if isinstance(event, Placed)), None)

    @property
    def root(self) -> Root | None:
        """None if the request was not sent to a prefill worker."""
        placed = self.placed
        return None if placed is None else Root(self.cache_salt, self.adapter, *placed.home)

    @property
    def ended_ms(self) -> int:
        """When it ended; now while it runs."""
        return self.time_ms(self.age_s)

    @property
    def computed_ms(self) -> int:
        """When its prompt was first computed; 0 if it was not."""
        times = (at_s for at_s, event in self.events if isinstance(event, Computed))
        return next(map(self.time_ms, times), 0)

    @property
    def num_bytes(self) -> int:
        """An upper bound of its memory."""
        events = [event for _, event in self.events]
        lists = ("workers", "prefill", "decode", "holders")
        num_items = sum(len(getattr(event, name, ())) for event in events for name in lists)
        num_bytes = _RECORD_BYTES + _EVENT_BYTES * len(events) + _ITEM_BYTES * num_items
        return num_bytes + len(self.hashes)

    def time_ms(self, at_s: float) -> int:
        return self.arrived_ms + round(at_s * 1000)

    def block(self, index: int) -> bytes:
        """The hash of the tokens up to this block; empty if the record does not have it."""
        return self.hashes[HASH_BYTES * index : HASH_BYTES * (index + 1)]

    def is_visible_to(self, caller: Caller) -> bool:
        """Operators see all requests, a key its own, and without keys a host its own."""
        mine = self.caller
        return caller.is_operator or (mine.key, mine.host) == (caller.key, caller.host)

    def metrics(self) -> RequestMetrics:
        """The figures so far of a request that was queued. The four durations add up to the time
        since the arrival."""
        stats = self.stats
        assert stats is not None
        spent = {phase: self._spent_s[phase] for phase in Phase}
        spent[self.phase] += self.age_s - self._since_s
        begun_s = self.first_prefill_s or 0.0
        generated_s, num_tokens = stats.generation_time_s, stats.num_generated_tokens
        num_gaps = num_tokens - 1 if self.num_sequences == 1 else 0
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
