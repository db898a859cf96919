"""The trace of a job: what a worker reports of one attempt of a request.

prefill worker     queue, store allocate, fetch, compute, store detach
decode worker      store claim, decode, swap out, store detach
"""

from typing import TYPE_CHECKING

from services.protocol.ticket import Ticket
from services.worker.requests.events import Ending

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from services.common.tracing.tracer import Attributes, Tracer


class JobTrace:
    """The trace of a job whose request is not traced: nothing."""

    def enter(self, stage: str, attributes: "Attributes | None" = None) -> None:
        """Begin a stage, unless the trace has ended; the stage before ends."""

    def note_call(self, name: str, start_ns: int, attributes: "Attributes") -> None:
        """Report a call of the store that has just returned."""

    def note_step(self, num_tokens: int) -> None:
        """Count a step of the engine that generated `num_tokens` tokens of the job."""

    def end(self, outcome: str | Ending) -> None:
        """End all spans. A second call does nothing."""


NO_TRACE = JobTrace()


class SpansOfJob(JobTrace):
    """The span of a job, a child of its attempt's at the gateway, and in it one for each stage."""

    def __init__(self, tracer: "Tracer", name: str, ticket: Ticket, worker_id: str) -> None:
        self._tracer = tracer
        attributes = {"quire.worker.id": worker_id, "quire.pool.id": ticket.pool_id}
        self._span = tracer.start(name, ticket.traceparent, attributes)
        self._stage: Span | None = None
        self._num_steps = self._num_tokens = 0
        self._ended = False

    def enter(self, stage: str, attributes: "Attributes | None" = None) -> None:
        if self._ended:
            return
        if self._stage is not None:
            self._stage.end()
        self._stage = self._tracer.start(stage, self._span, attributes or {})

    def note_call(self, name: str, start_ns: int, attributes: "Attributes") -> None:
        parent = self._stage or self._span
        self._tracer.start(name, parent, attributes, start_ns=start_ns).end()

    def note_step(self, num_tokens: int) -> None:
        self._num_steps += 1
        self._num_tokens += num_tokens

    def end(self, outcome: str | Ending) -> None:
        if self._ended:
            return
        self._ended = True
        if self._stage is not None:
            self._stage.end()
        if isinstance(outcome, Ending):
            outcome = _fail(self._tracer, self._span, outcome)
        self._span.set_attributes(
            {
                "quire.outcome": outcome,
                "quire.num_steps": self._num_steps,
                "quire.num_tokens": self._num_tokens,
            }
        )
        self._span.end()


def _fail(tracer: "Tracer", span: "Span", ending: Ending) -> str:
    """The name of an early end; an error becomes the span's."""
    if ending.error is not None:
        code, reason = ending.error
        tracer.fail(span, reason)
        return code
    return "aborted" if ending.requeue is None else ending.requeue.value
