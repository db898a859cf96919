"""Metrics: names as dashboards expect them, continued pool counters, and an endpoint that ends."""

import socket
import urllib.error
import urllib.request
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus_text

from blockstore.records import PoolSpec, PoolStats, Share
from blockstore.registry import Load
from services.runtime import exposition as exposition_module
from services.runtime.config import ServiceSettings
from services.runtime.errors import StartupError
from services.runtime.exposition import exposition, metrics_endpoint
from services.runtime.metrics import (
    MAX_TENANT_LABELS,
    OTHER_TENANTS,
    GatewayMetrics,
    PoolMetrics,
    WorkerMetrics,
)

MANY = MAX_TENANT_LABELS + 5
LABELS = {"pool_id": "p-1", "model_name": "tiny"}


def stats(num_held: int, num_queries: int, num_hits: int) -> PoolStats:
    spec = PoolSpec("p-1", "tiny", "f", num_blocks=8, block_size=16, block_bytes=1)
    return PoolStats(spec, 6 - num_held, 2, num_held, 1, 0, num_queries, num_hits, ("w",), ())


@pytest.mark.parametrize(
    ("metrics", "names"),
    [
        (
            GatewayMetrics,
            {
                "quire:time_to_first_token_seconds",
                "quire:inter_token_latency_seconds",
                "quire:e2e_request_latency_seconds",
                "quire:prompt_tokens",
                "quire:generation_tokens",
                "quire:num_preemptions",
                "quire:num_requests_running",
                "quire:num_requests_waiting",
            },
        ),
        (WorkerMetrics, {"quire:num_requests_running", "quire:generation_tokens"}),
        (
            PoolMetrics,
            {"quire:kv_cache_usage_perc", "quire:prefix_cache_queries", "quire:prefix_cache_hits"},
        ),
    ],
)
def test_names_are_those_of_the_contract(metrics: type, names: set[str]) -> None:
    registry = CollectorRegistry()
    metrics(registry)
    assert names <= {family.name for family in registry.collect()}


def test_pool_counters_are_carried_over() -> None:
    """The pool counts from its creation; the endpoint's counters follow it and never fall."""
    registry = CollectorRegistry()
    pools = PoolMetrics(registry)
    pools.observe(stats(num_held=4, num_queries=10, num_hits=3))
    pools.observe(stats(num_held=2, num_queries=15, num_hits=3))
    value = registry.get_sample_value
    assert value("quire:prefix_cache_queries_total", LABELS) == 15
    assert value("quire:prefix_cache_hits_total", LABELS) == 3
    assert value("quire:kv_cache_usage_perc", LABELS) == 0.25
    assert value("quire:kv_cache_blocks", {**LABELS, "state": "held"}) == 2


def test_shares_of_tenants_are_carried_over() -> None:
    """Also after a lost ledger, whose shares begin again. There are at most 101 series."""
    registry = CollectorRegistry()
    pools, value = PoolMetrics(registry), registry.get_sample_value
    for block_ms in (4000, 9000, 1000, 3000):
        mine = Share("acme", 3, block_ms), *(Share(f"t{n}", 1, 1000) for n in range(MANY))
        pools.observe(replace(stats(4, 10, 3), shares=mine))
    acme, others = {**LABELS, "tenant": "acme"}, {**LABELS, "tenant": OTHER_TENANTS}
    assert value("quire:tenant_kv_cache_block_seconds_total", acme) == 11
    assert value("quire:tenant_kv_cache_block_seconds_total", others) == 6


def test_a_pool_that_is_gone_is_not_shown() -> None:
    registry = CollectorRegistry()
    pools = PoolMetrics(registry)
    pools.observe(stats(4, 10, 3))
    pools.forget("p-1", "tiny")
    assert registry.get_sample_value("quire:kv_cache_usage_perc", LABELS) is None
    assert b'state="held"' not in generate_latest(registry)


def test_a_workers_load_is_shown() -> None:
    registry = CollectorRegistry()
    WorkerMetrics(registry).observe_load(Load(1, 2, 3, 4))
    assert registry.get_sample_value("quire:num_requests_waiting") == 2
    assert registry.get_sample_value("quire:num_pending_tokens") == 4


PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


@pytest.mark.parametrize(
    "accept",
    [
        "",
        "text/plain;version=0.0.4",
        "text/plain;version=1.0.0;escaping=underscores",
        "application/openmetrics-text",
        "application/openmetrics-text;version=1.0.0;escaping=underscores",
        "application/openmetrics-text;version=1.0.0;escaping=dots",
        "application/openmetrics-text;version=1.0.0;escaping=values",
        PROMETHEUS_2,
        PROMETHEUS_3,
    ],
)
def test_type_and_samples_have_the_same_name_in_both_formats(accept: str) -> None:
    """A sample with another name than its TYPE line would be a metric without a type."""
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    metrics.requests_finished.labels("tiny", "stop").inc(3)
    metrics.time_to_first_token_s.labels("tiny").observe(0.1)
    content, content_type = exposition(registry, accept)
    is_openmetrics = content_type.startswith("application/openmetrics-text")
    assert is_openmetrics == ("openmetrics" in accept)
    parse = openmetrics if is_openmetrics else prometheus_text
    families = {family.name: family for family in parse(content.decode())}
    assert families["quire:time_to_first_token_seconds"].type == "histogram"
    assert families["quire:num_requests_running"].type == "gauge"
    success = families["quire:request_success"]
    assert success.type == "counter"
    found = [sample for sample in success.samples if sample.name == "quire:request_success_total"]
    assert [sample.value for sample in found] == [3]
    for family in families.values():
        assert family.type != "unknown"
        assert all(sample.name.startswith(family.name) for sample in family.samples)


def test_the_endpoint_answers_and_ends() -> None:
    registry = CollectorRegistry()
    WorkerMetrics(registry).generation_tokens.inc(7)
    with metrics_endpoint(ServiceSettings(metrics_port=0), registry) as port:
        url = f"http://127.0.0.1:{port}/metrics"
        asked = urllib.request.Request(url, headers={"Accept": PROMETHEUS_2})
        with urllib.request.urlopen(asked, timeout=5) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            assert b"quire:generation_tokens_total 7.0" in answer.read()
        with (
            pytest.raises(StartupError, match=f"metrics: cannot listen on 127.0.0.1:{port}"),
            metrics_endpoint(ServiceSettings(metrics_port=port), registry),
        ):
            pass
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url, timeout=5)


def test_a_second_process_takes_over_a_shared_port() -> None:
    old, new = CollectorRegistry(), CollectorRegistry()
    WorkerMetrics(new).generation_tokens.inc(7)
    with ExitStack() as stack:
        with metrics_endpoint(ServiceSettings(metrics_port=0), old, shares_port=True) as port:
            settings = ServiceSettings(metrics_port=port)
            stack.enter_context(metrics_endpoint(settings, new, shares_port=True))
        for _ in range(8):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
                assert b"quire:generation_tokens_total 7.0" in answer.read()


def test_idle_connections_end(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A scrape is answered beside them, and their ends are no errors."""
    monkeypatch.setattr(exposition_module._QuietHandler, "timeout", 0.1)
    with metrics_endpoint(ServiceSettings(metrics_port=0), CollectorRegistry()) as port:
        assert port is not None
        idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
        url = f"http://127.0.0.1:{port}/metrics"
        with urllib.request.urlopen(url, timeout=5) as answer:
            assert answer.status == 200
        for connection in idle:
            connection.settimeout(10)
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b""
            connection.close()
    assert "Traceback" not in capfd.readouterr().err


def test_no_port_is_no_endpoint() -> None:
    with metrics_endpoint(ServiceSettings(), CollectorRegistry()) as port:
        assert port is None
