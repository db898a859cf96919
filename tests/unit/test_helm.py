"""The Helm chart, rendered by Helm's own engine: valid for Kubernetes, and complete for the
services."""

import json
from collections.abc import Iterator
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import kubernetes_validate
import promql_parser
import pytest
import yaml  # type: ignore[import-untyped]
from helm_python.chart import Chart, lint
from helm_python.errors import HelmError
from prometheus_client import CollectorRegistry

from services.block_manager.config import BlockManagerSettings
from services.gateway.config import GatewaySettings
from services.mover.config import MoverSettings
from services.runtime.config import ServiceSettings, load_settings
from services.runtime.metrics import GatewayMetrics
from services.worker.config import DecodeSettings, PrefillSettings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "quire"
KUBERNETES = "1.37.0"
SETTINGS: dict[str, type[ServiceSettings]] = {
    "services.block_manager": BlockManagerSettings,
    "--role=prefill": PrefillSettings,
    "--role=decode": DecodeSettings,
    "services.gateway": GatewaySettings,
    "services.mover": MoverSettings,
}
MODEL = Chart.load(CHART).values["models"][0]
TWO_MODELS = [
    MODEL | {"name": "small", "servedName": "small", "prefill": 2, "decode": 3,
             "settings": {"MAX_NUM_SEQS": 32}, "autoscaling": {"enabled": True, "maxPods": 4},
             "volume": {"persistentVolumeClaim": {"claimName": "models"}}},
    MODEL | {"name": "large", "gpu": {"enabled": True, "deviceClass": "gpu.nvidia.com",
                                      "memoryUtilization": 0.8}, "poolMemory": ""},
]  # fmt: skip
SCALED = MODEL | {"servedName": "m"}
ONE_ROLE_EACH = [
    MODEL | {"name": "prefill", "servedName": "m", "prefill": 2, "decode": 0},
    MODEL | {"name": "decode", "servedName": "m", "prefill": 0, "decode": 3, "pods": 4,
             "autoscaling": {"enabled": True}},
]  # fmt: skip
VALUES: dict[str, dict[str, Any]] = {
    "default": {},
    "everything": {"models": TWO_MODELS, "monitoring": {"serviceMonitor": True}},
    "hosts": {
        "models": ONE_ROLE_EACH,
        "mover": {
            "enabled": True,
            "settings": {"LEASE_S": 20},
            "env": {"UCX_NET_DEVICES": "eth0"},
            "resources": {"requests": {"cpu": "500m"}},
        },
        "monitoring": {"serviceMonitor": True},
    },
    "own": {
        "redis": {"url": "sentinel://quire@a:26379,b:26379/ledger/0"},
        "existingSecrets": {"credentials": "c", "tls": "t", "keys": "k"},
        "networkPolicy": {"clients": [{"ipBlock": {"cidr": "10.0.0.0/8"}}], "monitoring": []},
        "gateway": {"hosts": ["llm.example.com"], "resources": {"limits": {"memory": "1Gi"}}},
    },
}


def rendered(values: dict[str, Any]) -> list[dict[str, Any]]:
    files = Chart.load(CHART).render(values, name="rel", namespace="ns")
    documents = [each for text in files.values() for each in yaml.safe_load_all(text)]
    return [each for each in documents if each]


def checked(values: dict[str, Any]) -> None:
    Chart.load(CHART).validate_schema(values)
    rendered(values)


def of_kind(kind: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    return [each for each in rendered(values) if each["kind"] == kind]


def containers(values: dict[str, Any]) -> list[dict[str, Any]]:
    pods = [each["spec"]["template"]["spec"] for each in of_kind("Deployment", values)]
    return [container for pod in pods for container in pod["containers"]]


@pytest.fixture(params=VALUES)
def values(request: pytest.FixtureRequest) -> dict[str, Any]:
    return VALUES[request.param]


def test_helm_finds_no_fault(values: dict[str, Any]) -> None:
    report = lint(CHART, values, strict=True)
    assert (report["messages"], report["errors"]) == ([], [])


def test_manifests_are_valid_for_kubernetes(values: dict[str, Any]) -> None:
    """Custom resources have no schema here; another test checks them."""
    for document in rendered(values):
        if document["kind"] not in ("ServiceMonitor", "ScaledObject"):
            kubernetes_validate.validate(document, KUBERNETES, strict=True)


def test_services_understand_their_settings(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    num_loaded = 0
    for container in containers(values):
        if (cls := SETTINGS.get(container["command"][-1])) is None:
            continue
        with monkeypatch.context() as patch:
            for entry in container["env"]:
                patch.setenv(entry["name"], entry.get("value", "10.0.0.1"))
            loaded = load_settings(cls)
        assert loaded.tls_cert is not None
        assert loaded.metrics_port == container["ports"][-1]["containerPort"]
        num_loaded += 1
    assert num_loaded >= 4


def test_scaling_asks_for_a_metric_that_is_exported() -> None:
    """Each query selects a series of a gateway that has recommended workers. Without one the number
    of pods stays: KEDA would take no answer for 0."""
    exported = CollectorRegistry()
    gauge = GatewayMetrics(exported).recommended_workers
    (scaled,) = of_kind("ScaledObject", VALUES["everything"])
    assert scaled["spec"]["scaleTargetRef"] == {"name": "rel-small"}
    assert [each["metadata"]["threshold"] for each in scaled["spec"]["triggers"]] == ["2", "3"]
    for role, trigger in zip(("prefill", "decode"), scaled["spec"]["triggers"], strict=True):
        gauge.labels("small", role).set(7)
        query: Any = promql_parser.parse(trigger["metadata"]["query"])
        assert (str(query.op), query.modifier) == ("max", None)
        selected = {each.name: each.value for each in query.expr.matchers.matchers}
        assert selected.pop("namespace") == "ns", "Prometheus adds it: see the ServiceMonitors"
        assert exported.get_sample_value(query.expr.name, selected) == 7
        assert trigger["metadata"]["ignoreNullValues"] == "false"


def test_monitors_name_the_jobs_of_dashboards_and_alerts() -> None:
    """Otherwise an alert says that no worker is there, and panels are empty."""
    monitoring = yaml.safe_load((ROOT / "deploy" / "monitoring" / "prometheus.yml").read_text())
    jobs = {
        endpoint["port"]: relabeling["replacement"]
        for monitor in of_kind("ServiceMonitor", VALUES["everything"])
        for endpoint in monitor["spec"]["endpoints"]
        for relabeling in endpoint["relabelings"]
        if relabeling["targetLabel"] == "job"
    }
    assert jobs.keys() >= {"metrics", "m-manager", "m-prefill-0", "m-decode-0"}
    assert set(jobs.values()) - {"mover"} == {
        each["job_name"] for each in monitoring["scrape_configs"]
    }
    assert jobs["m-prefill-0"] == "prefill"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"model": []}, "model"),
        ({"models": [MODEL | {"decode": 0}]}, "workers of one role, so its pods need movers"),
        ({"models": [MODEL | {"decode": 0, "prefill": 0}]}, "has no workers"),
        ({"mover": {"enable": True}}, "mover"),
        ({"models": [MODEL | {"autoscaling": {"enabled": True}}]}, "servedName"),
        ({"models": [SCALED | {"autoscaling": {"enabled": True, "minPods": 9}}]}, "9 above maxP"),
        ({"redis": {"url": "http://h"}}, "redis"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(HelmError, match=text):
        checked(values)


FREE = {"settings", "env", "resources", "volume", "nodeSelector"}
"""Values whose keys are those of services, of UCX and of Kubernetes."""


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all objects of the values whose keys are the chart's own."""
    if isinstance(node, dict):
        yield path
        for key, value in node.items():
            if key not in FREE:
                yield from places(value, (*path, key))
    elif path == ("models",):
        yield from places(node[0], (*path, 0))


def test_schema_and_values_have_the_same_keys() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = Chart.load(CHART).values
    for path in places(values):
        named = schema
        for key in path:
            named = named["items"] if key == 0 else named["properties"][key]
        node = reduce(getitem, path, values)
        assert set(named["properties"]) - {"global"} == set(node), path
