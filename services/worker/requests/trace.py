"""The trace of a job: what a worker reports of one attempt of a request.

prefill worker     queue, store allocate, fetch, compute, store detach
decode worker      store claim, decode, swap out, store detach
"""

from typing import TYPE_CHECKING

from services.protocol.ticket import Ticket
from services.worker.requests.events import Ending

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from services.runtime.tracing.tracer import Attributes, Tracer


class JobTrace:
    """The span of a job, a child of its attempt's at the gateway, and in it one for each stage.
    Before `begin` and after `end` there is none, and the other methods do nothing."""

    def __init__(self) -> None:
        self._span: Span | None = None
        self._stage: Span | None = None
        self._num_steps = self._num_tokens = 0

    def begin(self, tracer: "Tracer", name: str, ticket: Ticket, worker_id: str) -> None:
        attributes = {"quire.worker.id": worker_id, "quire.pool.id": ticket.pool_id}
        self._tracer = tracer
        self._span = tracer.start(name, ticket.traceparent, attributes)

    def enter(self, stage: str, attributes: "Attributes | None" = None) -> None:
        """Begin a stage; the one before ends."""
        if self._span is None:
            return
        if self._stage is not None:
            self._stage.end()
        self._stage = self._tracer.start(stage, self._span, attributes or {})

    def note_call(self, name: str, start_ns: int, attributes: "Attributes") -> None:
        """Report a call of the store that has just returned."""
        if parent := self._stage or self._span:
            self._tracer.start(name, parent, attributes, start_ns=start_ns).end()

    def note_step(self, num_tokens: int) -> None:
        """Count a step of the engine that generated `num_tokens` tokens of the job."""
        self._num_steps += 1
        self._num_tokens += num_tokens

    def end(self, outcome: str | Ending) -> None:
        span, self._span = self._span, None
        if span is None:
            return
        if self._stage is not None:
            self._stage.end()
            self._stage = None
        if isinstance(outcome, Ending):
            outcome = _fail(self._tracer, span, outcome)
        span.set_attributes(
            {
                "quire.outcome": outcome,
                "quire.num_steps": self._num_steps,
                "quire.num_tokens": self._num_tokens,
            }
        )
        span.end()


def _fail(tracer: "Tracer", span: "Span", ending: Ending) -> str:
    """The name of an early end; an error becomes the span's."""
    if ending.error is not None:
        code, reason = ending.error
        tracer.fail(span, reason)
        return code
    return "aborted" if ending.requeue is None else ending.requeue.value
