"""The Helm chart, rendered by Helm's own engine: valid for Kubernetes, and complete for the
services."""

import json
import re
import subprocess
from collections.abc import Iterator
from copy import deepcopy
from functools import reduce
from importlib.metadata import version
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
from services.common.runtime.config import ServiceSettings, load_settings
from services.common.runtime.metrics import GatewayMetrics
from services.gateway.config import GatewaySettings
from services.mover.config import MoverSettings
from services.worker.config import DecodeSettings, PrefillSettings

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "quire"
KUBERNETES = "1.37.0"
STOP_GRACE_S = ServiceSettings.model_fields["stop_grace_s"].default
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


def test_a_wrong_field_is_seen() -> None:
    (document, *_) = of_kind("Deployment", {})
    document["spec"]["template"]["spec"]["terminationGracePeriod"] = 3
    with pytest.raises(kubernetes_validate.ValidationError):
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


def test_a_pods_services_have_ports_of_their_own() -> None:
    """All containers share the pod's network."""
    for deployment in of_kind("Deployment", VALUES["everything"]):
        pod = deployment["spec"]["template"]["spec"]
        own = [entry for each in pod["containers"] for entry in each.get("env", ())]
        ports = [entry["value"] for entry in own if entry["name"].endswith("_PORT")]
        assert len(set(ports)) == len(ports)


def test_a_pool_is_in_memory_and_workers_drain_in_time(values: dict[str, Any]) -> None:
    chart = Chart.load(CHART).merge_values(values)
    for deployment in of_kind("Deployment", values):
        pod = deployment["spec"]["template"]["spec"]
        workers = [each for each in pod["containers"] if each["name"].startswith(("pref", "dec"))]
        for worker in workers:
            command = worker["lifecycle"]["preStop"]["exec"]["command"][-1]
            assert re.search(rf"--wait --timeout {chart['drainSeconds']}\b", command)
        if workers:
            (pools,) = (each for each in pod["volumes"] if each["name"] == "pools")
            assert pools["emptyDir"]["medium"] == "Memory"
            assert chart["stopGraceSeconds"] == STOP_GRACE_S
            needed = chart["drainSeconds"] + 2 * chart["stopGraceSeconds"]
            assert pod["terminationGracePeriodSeconds"] > needed


def test_workers_on_a_gpu_share_one_claim() -> None:
    (pod,) = (
        each["spec"]["template"]["spec"]
        for each in of_kind("Deployment", VALUES["everything"])
        if each["metadata"]["name"] == "rel-large"
    )
    assert pod["hostPID"]
    (claim,) = of_kind("ResourceClaimTemplate", VALUES["everything"])
    assert pod["resourceClaims"][0]["resourceClaimTemplateName"] == claim["metadata"]["name"]
    assert all(each["resources"]["claims"] == [{"name": "gpu"}] for each in pod["containers"])


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


@pytest.mark.parametrize(
    ("given", "pods"),
    [({}, (1, 8)), ({"maxPods": 4}, (1, 4)), ({"minPods": 3, "maxPods": 3}, (3, 3))],
)
def test_scaling_has_bounds(given: dict[str, int], pods: tuple[int, int]) -> None:
    """Items of a list have no defaults of their own in Helm, and KEDA's least number is 0."""
    model = MODEL | {"servedName": "m", "autoscaling": {"enabled": True, **given}}
    (scaled,) = of_kind("ScaledObject", {"models": [model]})
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == pods


def test_a_gpu_has_defaults() -> None:
    values = {"models": [MODEL | {"gpu": {"enabled": True}}]}
    (claim,) = of_kind("ResourceClaimTemplate", values)
    (request,) = claim["spec"]["spec"]["devices"]["requests"]
    assert request["exactly"]["deviceClassName"] == MODEL["gpu"]["deviceClass"]
    (decode,) = (each for each in containers(values) if each["name"] == "decode-0")
    share = {"name": "QUIRE_DECODE_GPU_MEMORY_UTILIZATION", "value": "0.9"}
    assert share in decode["env"]


def test_pods_with_movers_may_have_one_role_and_scale_by_it() -> None:
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in of_kind("Deployment", VALUES["hosts"])
    }
    for name, workers in (("prefill", 2), ("decode", 3)):
        found = [each["name"] for each in pods[f"rel-{name}"]["containers"]]
        assert found == ["block-manager", "mover", *(f"{name}-{n}" for n in range(workers))]
        assert pods[f"rel-{name}"]["shareProcessNamespace"]  # else no mover is registered
        mover = pods[f"rel-{name}"]["containers"][1]
        assert {"name": "pools", "mountPath": "/pools"} in mover["volumeMounts"]
        assert {"name": "UCX_NET_DEVICES", "value": "eth0"} in mover["env"]
        assert mover["image"] == f"quire-mover:{version('quire-serve')}"
    (scaled,) = of_kind("ScaledObject", VALUES["hosts"])
    (trigger,) = scaled["spec"]["triggers"]
    assert 'role="decode",model_name="m"' in trigger["metadata"]["query"]


@pytest.mark.parametrize("name", ["mover", "block-manager"])
def test_mover_and_block_manager_wait_for_the_workers_of_their_pod(
    tmp_path: Path, name: str
) -> None:
    """Other pods copy the requests of draining workers, and the block manager drains them."""
    (container, *_) = (each for each in containers(VALUES["hosts"]) if each["name"] == name)
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    assert {"name": "pools", "mountPath": "/pools"} in container["volumeMounts"]
    wait = command[-1].replace("/pools", str(tmp_path))
    locks = [tmp_path / "p" / "workers" / f"{role}-1.lock" for role in ("mover", "prefill")]
    locks[0].parent.mkdir(parents=True)
    for lock in locks:
        lock.touch()
    waiting = subprocess.Popen(["sh", "-c", wait])
    with pytest.raises(subprocess.TimeoutExpired):
        waiting.wait(0.2)
    locks[1].unlink()
    assert waiting.wait(10) == 0


def test_monitors_name_ports_of_their_services() -> None:
    documents = rendered(VALUES["everything"])
    services = [each for each in documents if each["kind"] == "Service"]
    monitors = [each for each in documents if each["kind"] == "ServiceMonitor"]
    assert len(monitors) == 3
    for monitor in monitors:
        wanted = monitor["spec"]["selector"]["matchLabels"].items()
        named = [
            {port["name"] for port in each["spec"]["ports"]}
            for each in services
            if wanted <= each["metadata"]["labels"].items()
        ]
        ports = {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]}
        assert any(ports <= names for names in named)


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


def test_a_service_for_clients_has_no_metrics() -> None:
    """A load balancer would show the metrics, which need no key, to everybody."""
    values = {"gateway": {"serviceType": "LoadBalancer"}}
    services = {each["metadata"]["name"]: each["spec"] for each in of_kind("Service", values)}
    outside = services.pop("rel-gateway")
    assert outside["type"] == "LoadBalancer"
    assert [port["port"] for port in outside["ports"]] == [50051, 8000]
    assert {each.get("type", "ClusterIP") for each in services.values()} == {"ClusterIP"}


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


@pytest.mark.parametrize("path", list(places(Chart.load(CHART).values)), ids=str)
def test_a_key_that_the_chart_does_not_know_is_refused(path: tuple[Any, ...]) -> None:
    """A misspelt value would silently have no effect."""
    values = deepcopy(Chart.load(CHART).values)
    Chart.load(CHART).validate_schema(values)
    reduce(getitem, path, values)["misspelt"] = 1
    with pytest.raises(HelmError, match="misspelt"):
        Chart.load(CHART).validate_schema(values)


def test_schema_and_values_have_the_same_keys() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = Chart.load(CHART).values
    for path in places(values):
        named = schema
        for key in path:
            named = named["items"] if key == 0 else named["properties"][key]
        node = reduce(getitem, path, values)
        assert set(named["properties"]) - {"global"} == set(node), path


def test_a_redis_of_another_ca_is_reached_with_its_secret() -> None:
    """All that speak to it have the files that the URL names."""
    url = "rediss://quire@valkey:6379/0?ssl_ca_certs=/etc/quire/redis/ca.crt"
    values = {**VALUES["hosts"], "redis": {"url": url, "tlsSecret": "valkey-ca"}}
    mount = {"name": "redis-tls", "mountPath": "/etc/quire/redis", "readOnly": True}
    for deployment in of_kind("Deployment", values):
        pod = deployment["spec"]["template"]["spec"]
        secrets = [each["secret"] for each in pod["volumes"] if each["name"] == "redis-tls"]
        assert secrets == [{"secretName": "valkey-ca", "defaultMode": 0o440}]
        for container in pod["containers"]:
            assert mount in container["volumeMounts"], container["name"]
            urls = [e["value"] for e in container["env"] if e["name"].endswith("REDIS_URL")]
            assert urls == [url]
    assert not any("valkey" in each["metadata"]["name"] for each in rendered(values))


def test_a_network_policy_lets_monitoring_read_every_metrics_port() -> None:
    """And nothing else: the ports of services, and of movers' memory, are for pods of the
    release."""
    policy, _ = of_kind("NetworkPolicy", VALUES["hosts"])
    ours, monitoring = policy["spec"]["ingress"]
    assert "ports" not in ours
    assert ours["from"] == [{"podSelector": policy["spec"]["podSelector"]}]
    (span,) = monitoring["ports"]
    largest = {"models": [MODEL | {"prefill": 64, "decode": 64}], "mover": {"enabled": True}}
    names = ("metrics", "m-")
    for container in containers(largest):
        for port in container["ports"]:
            is_metrics = port["name"].startswith(names)
            assert (span["port"] <= port["containerPort"] <= span["endPort"]) is is_metrics
