"""deploy/monitoring: every query of the dashboard and of the alerts names what services export.

With Prometheus on this machine the queries also run on it, after it has scraped a deployment.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

import promql_parser
import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from quire import Client, InvalidRequest, Sampling
from quire.supervisor.run_directory import free_port
from tests.e2e.deployment import Deployment

MONITORING = Path(__file__).parents[2] / "deploy" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana" / "dashboards" / "quire.json").read_text())
OF_PROMETHEUS = {"up": {"job", "instance"}, "ALERTS": {"alertname"}}
ADDED = {"job", "instance"}
"""Labels that Prometheus adds to every series."""


def panel_queries() -> list[tuple[str, str]]:
    """(panel's title, query) of the dashboard, with Grafana's variables replaced as it does."""
    return [
        (panel["title"], target["expr"].replace("$__rate_interval", "20s").replace("$model", ".*"))
        for panel in DASHBOARD["panels"]
        for target in panel.get("targets", ())
    ]


def alert_queries() -> list[tuple[str, str]]:
    groups = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
    return [(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


@dataclass
class Selectors:
    """The series that a query selects: name -> labels that the query uses."""

    labels: dict[str, set[str]] = field(default_factory=dict)

    @classmethod
    def of(cls, query: str) -> Selectors:
        found = cls()
        found.visit(promql_parser.parse(query), frozenset())
        return found

    def visit(self, node: Any, grouped: frozenset[str]) -> None:
        match type(node).__name__:
            case "VectorSelector":
                used = {matcher.name for matcher in node.matchers.matchers} | grouped
                self.labels.setdefault(node.name, set()).update(used)
            case "MatrixSelector":
                self.visit(node.vector_selector, grouped)
            case "AggregateExpr":
                labels = node.modifier.labels if node.modifier else ()
                self.visit(node.expr, frozenset(labels))
            case "BinaryExpr":
                self.visit(node.lhs, grouped)
                self.visit(node.rhs, grouped)
            case "Call":
                for argument in node.args:
                    self.visit(argument, grouped)
            case "ParenExpr" | "UnaryExpr" | "SubqueryExpr":
                self.visit(node.expr, grouped)
            case "NumberLiteral" | "StringLiteral":
                pass
            case other:
                raise AssertionError(f"this test does not know {other}")


@dataclass(frozen=True)
class Scraped:
    targets: dict[str, str]
    """Job -> host:port."""

    def labels(self) -> dict[str, set[str]]:
        """The labels of each exported series name."""
        found: dict[str, set[str]] = {}
        for target in self.targets.values():
            with urlopen(f"http://{target}/metrics") as answer:
                text = answer.read().decode()
            for family in text_string_to_metric_families(text):
                for sample in family.samples:
                    found.setdefault(sample.name, set()).update(sample.labels)
                found.setdefault(family.name, set())
        return found


def generate_load(address: str) -> None:
    with Client(address) as client:
        for number in range(3):
            client.complete(f"Paged attention {number}", Sampling(max_tokens=8))
        with pytest.raises(InvalidRequest):
            client.complete("x", Sampling(temperature=-1))


@pytest.fixture(scope="module")
def load(observed: Deployment, targets: dict[str, str]) -> tuple[Scraped, str]:
    """A deployment that exposes every service's metrics, after some requests."""
    generate_load(observed.address)
    return Scraped(targets), observed.address


def test_every_query_names_series_and_labels_that_are_exported(load: tuple[Scraped, str]) -> None:
    exported = load[0].labels() | OF_PROMETHEUS
    for title, query in [*panel_queries(), *alert_queries()]:
        for name, labels in Selectors.of(query).labels.items():
            assert name in exported, f"{title}: no service exports {name}"
            unknown = labels - exported[name] - ADDED
            assert not unknown, f"{title}: {name} has no label {unknown}"


def test_every_service_says_that_it_is_healthy(load: tuple[Scraped, str]) -> None:
    for target in load[0].targets.values():
        with urlopen(f"http://{target}/health") as answer:
            assert answer.read() == b"serving\n"


def test_an_unknown_series_or_label_is_found() -> None:
    selectors = Selectors.of('sum by (le, pod) (rate(quire:step_seconds_bucket{job="x"}[1m]))')
    assert selectors.labels == {"quire:step_seconds_bucket": {"le", "pod", "job"}}


@pytest.fixture
def prometheus(load: tuple[Scraped, str], tmp_path: Path) -> Iterator[str]:
    """The URL of a Prometheus that scrapes the deployment each second."""
    if not shutil.which("prometheus"):
        pytest.skip("Prometheus is not installed (on Debian: apt install prometheus)")
    jobs = [
        {"job_name": job, "static_configs": [{"targets": [target]}]}
        for job, target in load[0].targets.items()
    ]
    configuration = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    command = [
        "prometheus",
        f"--config.file={tmp_path / 'prometheus.yml'}",
        f"--storage.tsdb.path={tmp_path / 'data'}",
        f"--web.listen-address={address}",
    ]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://{address}"
    finally:
        process.terminate()
        process.wait()


def query(url: str, text: str) -> list[Any]:
    with urlopen(f"{url}/api/v1/query?{urlencode({'query': text})}") as answer:
        result: list[Any] = json.load(answer)["data"]["result"]
    return result


def test_every_panel_shows_something_on_a_real_prometheus(
    load: tuple[Scraped, str], prometheus: str
) -> None:
    empty = dict(panel_queries())
    deadline = time.monotonic() + 60
    while empty and time.monotonic() < deadline:
        generate_load(load[1])  # a rate needs two scrapes with a difference
        try:
            empty = {t: q for t, q in panel_queries() if not query(prometheus, q)}
        except OSError:  # it is starting
            time.sleep(0.2)
    assert empty == {}
    for title, text in alert_queries():
        query(prometheus, text)  # HTTP 400, and so an error, if it is not valid
        assert title


def test_alerts_fire_on_their_conditions_only() -> None:
    if not shutil.which("promtool"):
        pytest.skip("promtool is not installed (on Debian: apt install prometheus)")
    command = ["promtool", "test", "rules", str(MONITORING / "alerts_test.yml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
