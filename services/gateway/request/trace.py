"""The trace of a request: its span, in it one for each attempt, and in these one for each phase.

    text_completion tiny           its parent is the client's span
      attempt 1                    the parent of the spans of workers
        waiting, prefill, hand-off, decode
      attempt 2                    linked to attempt 1
        lost, prefill, hand-off, decode, moving, decode

No span shows a prompt or an answer. The names of attributes are OpenTelemetry's for generative AI,
as far as it has any.
"""

from typing import TYPE_CHECKING

from services.gateway.api import ChatMessage, PromptRequest
from services.gateway.request.events import Phase
from services.gateway.request.status import CANCELLED
from services.runtime.rpc.error_table import INTERNAL_CODE
from services.runtime.tracing.context import current_traceparent

if TYPE_CHECKING:
    from opentelemetry.trace import Span

    from services.gateway.output.output import RequestStats
    from services.gateway.request.request import Request
    from services.runtime.tracing.tracer import Tracer

_QUEUED = frozenset({Phase.WAITING, Phase.PREEMPTED, Phase.LOST})
"""The phases that begin an attempt."""


class RequestTrace:
    """The spans of one request."""

    def __init__(self, tracer: "Tracer", asked: PromptRequest, name: str) -> None:
        """`name` is the request's id, as the client knows it."""
        prompt = asked.prompt
        is_chat = not isinstance(prompt, str) and isinstance(next(iter(prompt), None), ChatMessage)
        self._operation = "chat" if is_chat else "text_completion"
        attributes = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": "quire",
            "gen_ai.response.id": name,
        }
        self._tracer = tracer
        self.span = tracer.start(
            self._operation, current_traceparent(), attributes, is_request=True
        )
        self._attempt = self.span
        self._phase: Span | None = None
        self._num_attempts = 0
        self.traceparent = ""
        """For workers: of the attempt; "" if the request is not sampled."""

    @property
    def trace_id(self) -> str:
        return f"{self.span.get_span_context().trace_id:032x}"

    def admit(self, request: "Request") -> None:
        """Add what admission has resolved."""
        sampling, caller = request.sampling, request.asked.caller
        self.span.update_name(f"{self._operation} {request.model}")
        self.span.set_attributes(
            {
                "gen_ai.request.model": request.model,
                "gen_ai.response.model": request.model,
                "gen_ai.request.choice.count": request.sampling.n,
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.top_p": sampling.top_p,
                "gen_ai.request.top_k": sampling.top_k,
                "gen_ai.request.frequency_penalty": sampling.frequency_penalty,
                "gen_ai.request.presence_penalty": sampling.presence_penalty,
                "gen_ai.usage.input_tokens": len(request.prompt_token_ids),
                "quire.request.priority": request.asked.priority,
                **({"quire.tenant": caller.tenant} if caller.tenant else {}),
            }
        )

    def refuse(self, error: Exception, code: str) -> None:
        """End the trace of a request that was not queued."""
        self._fail(code, error)
        self.span.end()

    def cancel(self) -> None:
        """End the trace of a request whose client left before it was queued."""
        self.span.set_attribute("quire.outcome", CANCELLED)
        self.span.end()

    def _fail(self, code: str, error: Exception) -> None:
        self.span.set_attribute("error.type", code)
        self._tracer.fail(self.span, str(error) if code != INTERNAL_CODE else "internal error")

    def join(self, running: "RequestTrace") -> None:
        """End the trace of a call that continues a request which runs here."""
        self.span.add_link(running.span.get_span_context(), {"quire.link": "resumed"})
        self.span.end()

    def enter(self, phase: Phase, worker_id: str) -> None:
        """Begin a phase, and with it an attempt if the request is queued."""
        if self._phase is not None:
            self._phase.end()
        if phase in _QUEUED:
            self._begin_attempt(phase)
        attributes = {"quire.worker.id": worker_id} if worker_id else {}
        self._phase = self._tracer.start(phase.value, self._attempt, attributes)

    def _begin_attempt(self, phase: Phase) -> None:
        previous = self._attempt if self._num_attempts else None
        if previous is not None:
            previous.set_attribute("quire.attempt.outcome", phase.value)
            previous.end()
        self._num_attempts += 1
        attributes = {"quire.attempt.number": self._num_attempts}
        name = f"attempt {self._num_attempts}"
        self._attempt = self._tracer.start(name, self.span, attributes, follows=previous)
        self.traceparent = self._tracer.traceparent(self._attempt)

    def set_back(self, reason: str) -> None:
        """Note why the attempt fails."""
        self._tracer.fail(self._attempt, reason)

    def end(self, outcome: str, error: Exception | None, stats: "RequestStats") -> None:
        """End all spans. `outcome` is the `Record.outcome`."""
        if self._phase is not None:
            self._phase.end()
        self._attempt.set_attribute("quire.attempt.outcome", outcome)
        self._attempt.end()
        self.span.set_attributes(
            {
                "gen_ai.usage.output_tokens": stats.num_generated_tokens,
                "gen_ai.usage.cache_read.input_tokens": stats.num_cached_tokens,
                "gen_ai.response.time_to_first_chunk": stats.time_to_first_token_s,
                "quire.outcome": outcome,
                "quire.num_attempts": self._num_attempts,
                "quire.num_preemptions": stats.num_preemptions,
                "quire.num_moves": stats.num_moves,
            }
        )
        if error is not None:
            self._fail(outcome, error)
        elif outcome != CANCELLED:
            self.span.set_attribute("gen_ai.response.finish_reasons", [outcome])
        self.span.end()
