"""Makes spans and sends them to a collector: OpenTelemetry's SDK and its OTLP exporter over gRPC.

A thread of the SDK sends them in batches. A collector that is slow or away costs spans, which are
counted, and never a request.
"""

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from socket import gethostname

from opentelemetry.exporter.otlp.proto.grpc.exporter import OTLPExporterMixin
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from services.runtime.logging import get_logger
from services.runtime.tracing.context import TRACEPARENT

MAX_QUEUED_SPANS = 4096
_BATCH = 512
_SEND_INTERVAL_MS = 1000
_SEND_LIMIT_S = 5
_CLOSE_LIMIT_S = 1.0
"""How long a service that ends waits for its last spans to be sent."""

Attributes = Mapping[str, str | bool | int | float | Sequence[str]]

log = get_logger(__name__)
_w3c = TraceContextTextMapPropagator()


class Tracer:
    """The tracer of one process. A child span is sampled if its parent is."""

    def __init__(self, endpoint: str, service: str, ratio: float) -> None:
        resource = Resource.create(
            {
                "service.namespace": "quire",
                "service.name": f"quire-{service}",
                "service.version": version("quire-serve"),
                "service.instance.id": f"{gethostname()}:{os.getpid()}",
            }
        )
        sampler = ParentBased(TraceIdRatioBased(ratio))
        self._provider = TracerProvider(sampler, resource, shutdown_on_exit=False)
        self._exporter = _CountingExporter(endpoint)
        self._provider.add_span_processor(_BoundedProcessor(self._exporter))
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
        """Start a span. `parent`: a span, or a traceparent; "" or one that is malformed starts a
        trace. `start_ns`: Unix time; None: now. `follows`: a span to link to."""
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
        if num_dropped := self._exporter.num_dropped:
            log.warning("spans_dropped_in_all", num_spans=num_dropped)


class _CountingExporter(SpanExporter):
    """Sends spans; counts those that were dropped, and logs the first of a row of failures."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._otlp = OTLPSpanExporter(endpoint, timeout=_SEND_LIMIT_S)
        self._failing = False
        self._reason = "the queue is full"
        self.free = threading.Semaphore(MAX_QUEUED_SPANS)
        """Room in the queue."""
        self.num_dropped = 0
        self._counting = threading.Lock()
        logging.getLogger(OTLPExporterMixin.__module__).addFilter(self._keep_reason)

    def _keep_reason(self, record: logging.LogRecord) -> bool:
        """Keeps what the library would log with each batch for this class's own line."""
        self._reason = record.getMessage()
        return False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._otlp.export(spans)
        self.free.release(len(spans))
        if result is SpanExportResult.SUCCESS:
            self._failing = False
        else:
            self.drop(len(spans))
        return result

    def drop(self, num_spans: int) -> None:
        with self._counting:
            self.num_dropped += num_spans
            is_first, self._failing = not self._failing, True
        if is_first:
            log.warning(
                "spans_dropped",
                endpoint=self._endpoint,
                reason=self._reason,
                num_spans=self.num_dropped,
            )

    def shutdown(self) -> None:
        self._otlp.shutdown()


class _BoundedProcessor(BatchSpanProcessor):
    """Queues spans. A new one is dropped while the queue is full."""

    def __init__(self, exporter: _CountingExporter) -> None:
        super().__init__(exporter, MAX_QUEUED_SPANS, _SEND_INTERVAL_MS, _BATCH)
        self._bounded = exporter

    def on_end(self, span: ReadableSpan) -> None:
        if self._bounded.free.acquire(blocking=False):
            super().on_end(span)
        else:
            self._bounded.drop(1)
