"""The metrics of all services of a run at one gateway."""

import socket
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from services.runtime.config import ServiceSettings
from services.runtime.exposition import exposition, metrics_endpoint
from services.runtime.metrics import GatewayMetrics, WorkerMetrics
from services.runtime.metrics_socket import WithServices, metrics_socket

DECODE = {"job": "decode", "instance": "decode-1"}


def samples(
    own: CollectorRegistry, directory: Path
) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Labels and value of all samples, by name. The parser refuses a family that comes twice."""
    content, _ = exposition(WithServices(own, directory), "application/openmetrics-text")
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(content.decode()):  # type: ignore[no-untyped-call]
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def gateway() -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics = GatewayMetrics(registry)
    metrics.generation_tokens.labels("tiny").inc(5)
    metrics.num_requests_running.set(1)
    return registry


def worker() -> CollectorRegistry:
    registry = CollectorRegistry()
    metrics = WorkerMetrics(registry)
    metrics.generation_tokens.inc(7)
    metrics.num_draft_tokens.inc(3)
    metrics.step_s.observe(0.1)
    return registry


def test_the_gateway_has_the_metrics_of_all_services(tmp_path: Path) -> None:
    """The gateway's own stay as they are; those of others say whose they are."""
    settings = ServiceSettings(metrics_socket=tmp_path / "metrics" / "decode-1.sock")
    with metrics_endpoint(settings, worker()):
        found = samples(gateway(), tmp_path / "metrics")
    assert found["quire:generation_tokens_total"] == [({"model_name": "tiny"}, 5), (DECODE, 7)]
    assert found["quire:num_requests_running"] == [({}, 1), (DECODE, 0)]
    assert found["quire:spec_decode_num_draft_tokens_total"] == [(DECODE, 3)]
    assert found["quire:step_seconds_count"] == [(DECODE, 1)]
    assert "quire:step_seconds_count" not in samples(gateway(), tmp_path / "metrics")


def test_services_that_do_not_answer_are_left_out(tmp_path: Path) -> None:
    """One was killed and left its socket, one is stopped, and one writes no metrics."""
    dead, stopped = (socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(2))
    dead.bind(str(tmp_path / "prefill-1.sock"))
    dead.close()
    stopped.bind(str(tmp_path / "prefill-2.sock"))
    stopped.listen()
    with metrics_socket(tmp_path / "decode-1.sock", worker()), stopped:
        found = samples(gateway(), tmp_path)
    assert [labels.get("instance") for labels, _ in found["quire:num_requests_waiting"]] == [
        None,
        "decode-1",
    ]


def test_a_service_that_starts_again_takes_its_socket_again(tmp_path: Path) -> None:
    (tmp_path / "decode-1.sock").touch()
    with metrics_socket(tmp_path / "decode-1.sock", worker()):
        assert "quire:step_seconds_count" in samples(gateway(), tmp_path)


def test_a_service_that_writes_too_much_is_left_out(tmp_path: Path) -> None:
    """More than 4 MiB: the help of one metric is as long as that."""
    registry = worker()
    Gauge("long", "x" * (4 << 20), registry=registry)
    with metrics_socket(tmp_path / "decode-1.sock", registry):
        assert "quire:step_seconds_count" not in samples(gateway(), tmp_path)
