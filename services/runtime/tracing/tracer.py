"""Makes spans and sends them to a collector: OpenTelemetry's SDK and its OTLP exporter over gRPC.

A thread of the SDK sends them in batches. A collector that is slow or away costs spans, which the
SDK logs at most every 20 s, and never a request.
"""

import os
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from socket import gethostname

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.runtime.tracing.context import TRACEPARENT

MAX_QUEUED_SPANS = 4096
_BATCH = 512
_SEND_INTERVAL_MS = 1000
_SEND_LIMIT_S = 5
_CLOSE_LIMIT_S = 1.0
"""How long a service that ends waits for its last spans to be sent."""

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]

_w3c = TraceContextTextMapPropagator()


class Tracer:
    """The tracer of one process. A child span is sampled if its parent is; other spans as the SDK's
    variable OTEL_TRACES_SAMPLER says, and all without it."""

    def __init__(self, endpoint: str, service: str) -> None:
        resource = Resource.create(
            {
                "service.namespace": "quire",
                "service.name": f"quire-{service}",
                "service.version": version("quire-serve"),
                "service.instance.id": f"{gethostname()}:{os.getpid()}",
            }
        )
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._exporter = OTLPSpanExporter(endpoint, timeout=_SEND_LIMIT_S)
        batches = self._exporter, MAX_QUEUED_SPANS, _SEND_INTERVAL_MS, _BATCH
        self._provider.add_span_processor(BatchSpanProcessor(*batches))
        self._tracer = self._provider.get_tracer("quire", version("quire-serve"))

    def start(
        self,
        name: str,
        parent: Span | str,
        attributes: Attributes,
        *,
        is_request: bool = False,
        start_ns: int | None = None,
        follows: Span | None = None,
    ) -> Span:
        """Start a span. `parent` is a span, or a traceparent; an empty or malformed one starts a
        trace. `start_ns` is Unix time; None is now. `follows` is a span to link to."""
        if isinstance(parent, str):
            context = _w3c.extract({TRACEPARENT: parent})
        else:
            context = set_span_in_context(parent)
        return self._tracer.start_span(
            name,
            context,
            SpanKind.SERVER if is_request else SpanKind.INTERNAL,
            attributes,
            [] if follows is None else [Link(follows.get_span_context())],
            start_ns,
        )

    @staticmethod
    def traceparent(span: Span) -> str:
        """The traceparent for children of a span in other processes; "" if it is not sampled."""
        if not span.is_recording():
            return ""
        carrier: dict[str, str] = {}
        _w3c.inject(carrier, set_span_in_context(span))
        return carrier[TRACEPARENT]

    @staticmethod
    def fail(span: Span, reason: str) -> None:
        span.set_status(Status(StatusCode.ERROR, reason))

    def close(self) -> None:
        """Send the last spans, within a limit."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(_CLOSE_LIMIT_S)
        self._exporter.shutdown()
        sending.join(_CLOSE_LIMIT_S)
