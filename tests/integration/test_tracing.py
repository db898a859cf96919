"""The tracer: sampling, dropped spans, and services that do not load it."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from services.gateway.access.caller import EVERYONE
from services.gateway.api import ChatMessage, GenerationRequest
from services.gateway.config import GatewaySettings
from services.gateway.output.output import RequestStats
from services.gateway.request.events import Phase
from services.gateway.request.record import Record
from services.gateway.request.trace import RequestTrace
from services.runtime.errors import StartupError
from services.runtime.tracing.opening import check_tracing, open_tracer
from services.runtime.tracing.tracer import MAX_QUEUED_SPANS, Tracer
from tests.collector import Collector, collecting

NOBODY = "http://127.0.0.1:1"
OF_CLIENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as running:
        yield running


def test_services_without_an_endpoint_do_not_load_opentelemetry() -> None:
    """They start where any import of it fails. (redis-py loads a part of it where it can.)"""
    program = """
import sys
sys.modules["opentelemetry"] = None
import services.gateway.process, services.worker.process
from services.runtime.tracing.opening import open_tracer
from services.gateway.config import GatewaySettings
with open_tracer(GatewaySettings(), None) as tracer:
    assert tracer is None
assert "services.runtime.tracing.tracer" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_endpoint_without_opentelemetry_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "services.runtime.tracing.tracer")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(StartupError, match=r"QUIRE_GATEWAY_OTLP_ENDPOINT .*quire-serve\[tracing\]"):
        check_tracing(GatewaySettings(), NOBODY)


@pytest.mark.parametrize("url", ["127.0.0.1:4317", "http://", "ftp://host:1", ""])
def test_endpoint_that_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="is not a URL such as"):
        GatewaySettings(otlp_endpoint=url)


@pytest.mark.parametrize(
    ("traceparent", "default", "is_sampled"),
    [
        ("", "on", True),
        ("", "off", False),
        (OF_CLIENT + "01", "off", True),
        (OF_CLIENT + "00", "on", False),
        ("00-nonsense", "on", True),
    ],
)
def test_the_client_decides_and_else_the_sampler(
    traceparent: str, default: str, is_sampled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", f"parentbased_always_{default}")
    with open_tracer(GatewaySettings(), NOBODY) as tracer:
        assert tracer is not None
        span = tracer.start("request", traceparent, {})
        assert span.is_recording() is is_sampled
        assert bool(tracer.traceparent(span)) is is_sampled


def test_unreachable_collector_costs_spans_and_a_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The queue is bounded, no call waits, and the service ends without a delay."""
    tracer = Tracer(NOBODY, "gateway")
    started = time.monotonic()
    for _ in range(2 * MAX_QUEUED_SPANS):
        tracer.start("request", "", {}).end()
    assert time.monotonic() - started < 2.0
    tracer.close()
    assert time.monotonic() - started < 5.0
    # The SDK repeats a line after 20 s, by the wall clock.
    assert 1 <= sum("Queue full" in text for text in caplog.messages) <= 2


def test_trace_of_a_preempted_request_has_an_attempt_for_each_turn(collector: Collector) -> None:
    tracer = Tracer(collector.address, "gateway")
    request = GenerationRequest((ChatMessage("user", "hidden"),))
    trace = RequestTrace(tracer, request, "request-1")
    record = Record("request-1", EVERYONE, trace=trace)
    first = trace.traceparent
    for phase in (Phase.PREFILL, Phase.HAND_OFF, Phase.DECODE):
        record.enter(phase, f"{phase.value}-worker")
    record.enter(Phase.PREEMPTED)
    assert trace.traceparent != first
    trace.set_back("decode worker d was lost")
    record.enter(Phase.LOST)
    trace.end("stop", None, RequestStats(7, 0.0, num_generated_tokens=3, num_preemptions=1))
    tracer.close()
    found = collector.wait(trace.trace_id, lambda trace: trace.num_named("chat") == 1)
    attempts = found.children(found.named("chat").id)
    assert [span.attributes["quire.attempt.outcome"] for span in attempts] == [
        *("preempted", "lost", "stop")
    ]
    assert [span.failed for span in attempts] == [False, True, False]
    assert [[link.span_id.hex() for link in span.proto.links] for span in attempts] == [
        *([], [attempts[0].id], [attempts[1].id])
    ]
    assert attempts[0].id in first


def test_request_whose_client_left_in_admission_is_a_span(collector: Collector) -> None:
    tracer = Tracer(collector.address, "gateway")
    trace = RequestTrace(tracer, GenerationRequest("text"), "request-1")
    trace.cancel()
    tracer.close()
    (span,) = collector.wait(trace.trace_id, lambda trace: bool(trace.spans)).spans
    assert (span.failed, span.attributes["quire.outcome"]) == (False, "cancelled")


def test_refused_request_is_a_failed_span(collector: Collector) -> None:
    tracer = Tracer(collector.address, "gateway")
    trace = RequestTrace(tracer, GenerationRequest("text"), "request-1")
    trace.refuse(StartupError("n is 0"), "invalid_request")
    tracer.close()
    (span,) = collector.wait(trace.trace_id, lambda trace: bool(trace.spans)).spans
    assert (span.failed, span.attributes["error.type"]) == (True, "invalid_request")
    assert span.proto.status.message == "n is 0"
