"""Traces of a deployment, as a collector gets them: one for each request, with its phases and
workers. (`tests/integration/test_tracing.py` has several attempts.)"""

import secrets
from itertools import pairwise

import httpx
import pytest

from tests.collector import Collector, Trace

from .deployment import Deployment

CLIENT_SPAN = "00f067aa0ba902b7"


@pytest.fixture(scope="module")
def traced(observed: Deployment) -> Deployment:
    return observed


def new_trace() -> tuple[str, str]:
    """The id of a new trace, and the traceparent of a client's span in it."""
    trace_id = secrets.token_hex(16)
    return trace_id, f"00-{trace_id}-{CLIENT_SPAN}-01"


def has_ended(trace: Trace) -> bool:
    return bool(trace.children(CLIENT_SPAN))


def phases(trace: Trace, attempt: str) -> list[str]:
    children = trace.children(trace.named(attempt).id)
    return [span.name for span in children if span.service == "quire-gateway"]


def test_trace_of_an_http_request_has_its_phases_in_order(
    traced: Deployment, collector: Collector
) -> None:
    """The request's span is a child of the client's, with gen_ai attributes."""
    trace_id, traceparent = new_trace()
    body = {"model": "tiny", "prompt": "secret words", "max_tokens": 9, "temperature": 0.5}
    answer = httpx.post(
        f"{traced.http}/v1/completions",
        json={**body, "ignore_eos": True},
        headers={"traceparent": traceparent},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    trace = collector.wait(trace_id, has_ended)
    request = trace.named("text_completion tiny")
    assert request.parent_id == CLIENT_SPAN
    assert request.service == "quire-gateway"
    expected = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "quire",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": answer.json()["usage"]["prompt_tokens"],
        "gen_ai.usage.output_tokens": 9,
        "gen_ai.response.finish_reasons": ["length"],
        "quire.num_attempts": 1,
    }
    assert {name: request.attributes.get(name) for name in expected} == expected
    (attempt,) = trace.children(request.id)
    assert phases(trace, attempt.name) == ["waiting", "prefill", "hand-off", "decode"]
    spans = [s for s in trace.children(attempt.id) if s.service == "quire-gateway"]
    assert all(before.end_ns <= after.start_ns for before, after in pairwise(spans))
    workers = [str(span.attributes.get("quire.worker.id", "")) for span in spans]
    assert [worker.partition("-")[0] for worker in workers] == ["", "prefill", "decode", "decode"]
    assert request.start_ns <= attempt.start_ns
    assert attempt.end_ns <= request.end_ns
    assert "secret" not in str(trace.spans)


def test_workers_report_their_part_of_an_attempt(traced: Deployment, collector: Collector) -> None:
    """Queue, compute and calls of the store, under the workers' spans of the attempt."""
    trace_id, traceparent = new_trace()
    body = {"model": "tiny", "prompt": "some words", "max_tokens": 9, "ignore_eos": True}
    headers = {"traceparent": traceparent}
    httpx.post(f"{traced.http}/v1/completions", json=body, headers=headers, timeout=60)
    workers = {"quire-prefill", "quire-decode"}
    names = {"prefill worker", "decode worker"}
    trace = collector.wait(
        trace_id, lambda trace: has_ended(trace) and names <= {span.name for span in trace.spans}
    )
    attempt = trace.named("attempt 1")
    reported = [span for span in trace.children(attempt.id) if span.service in workers]
    assert [span.name for span in reported] == ["prefill worker", "decode worker"]
    prefill, decode = reported
    stages = ["queue", "compute", "store detach"]
    assert [span.name for span in trace.children(prefill.id)] == stages
    (allocation,) = trace.children(trace.named("queue").id)
    assert allocation.name == "store allocate"
    assert [span.name for span in trace.children(decode.id)] == ["store claim", "decode steps"]
    at = [
        (span.attributes["quire.outcome"], span.attributes["quire.num_tokens"]) for span in reported
    ]
    assert at == [("issued", 1), ("finished", 8)]
    assert decode.attributes["quire.num_steps"] == 8
    for span, phase in ((prefill, "prefill"), (decode, "decode")):
        assert (
            span.attributes["quire.worker.id"] == trace.named(phase).attributes["quire.worker.id"]
        )
