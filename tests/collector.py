"""A collector of traces: the gRPC service that an OTLP exporter sends spans to."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1 import common_pb2
from opentelemetry.proto.resource.v1 import resource_pb2
from opentelemetry.proto.trace.v1 import trace_pb2

LIMIT_S = 30.0


@dataclass(frozen=True)
class ReceivedSpan:
    service: str
    proto: trace_pb2.Span
    attributes: dict[str, object]

    @property
    def name(self) -> str:
        return self.proto.name

    @property
    def id(self) -> str:
        return self.proto.span_id.hex()

    @property
    def parent_id(self) -> str:
        return self.proto.parent_span_id.hex()

    @property
    def start_ns(self) -> int:
        return self.proto.start_time_unix_nano

    @property
    def end_ns(self) -> int:
        return self.proto.end_time_unix_nano

    @property
    def failed(self) -> bool:
        return self.proto.status.code == trace_pb2.Status.STATUS_CODE_ERROR


@dataclass(frozen=True)
class Trace:
    """All spans of a trace, by their start."""

    spans: tuple[ReceivedSpan, ...]

    def children(self, parent_id: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.parent_id == parent_id]

    def num_named(self, name: str) -> int:
        return sum(span.name == name for span in self.spans)

    def named(self, name: str) -> ReceivedSpan:
        (span,) = (span for span in self.spans if span.name == name)
        return span


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spans: list[ReceivedSpan] = []
        self.address = ""

    def Export(
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        with self._changed:
            for resource in request.resource_spans:
                service = _attributes(resource.resource)["service.name"]
                for scope in resource.scope_spans:
                    self._spans += [
                        ReceivedSpan(str(service), span, _attributes(span)) for span in scope.spans
                    ]
            self._changed.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait(self, trace_id: str, is_whole: Callable[[Trace], bool]) -> Trace:
        """Wait for the trace until it is complete."""
        deadline = time.monotonic() + LIMIT_S
        with self._changed:
            while not is_whole(trace := self._trace(trace_id)):
                left_s = deadline - time.monotonic()
                names = [(span.service, span.name) for span in trace.spans]
                assert left_s > 0, f"only these spans came: {names}"
                self._changed.wait(left_s)
        return trace

    def _trace(self, trace_id: str) -> Trace:
        spans = (span for span in self._spans if span.proto.trace_id.hex() == trace_id)
        return Trace(tuple(sorted(spans, key=lambda span: span.start_ns)))


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    add: Any = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(collector, server)
    collector.address = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()


def _attributes(message: trace_pb2.Span | resource_pb2.Resource) -> dict[str, object]:
    return {pair.key: _value(pair.value) for pair in message.attributes}


def _value(value: common_pb2.AnyValue) -> object:
    kind = value.WhichOneof("value")
    assert kind is not None
    found: object = getattr(value, kind)
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else found
