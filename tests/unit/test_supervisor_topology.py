"""The services of a run, and the settings that each of them gets."""

from pathlib import Path
from typing import Any

import pytest

from quire.options.worker import WorkerOptions
from quire.supervisor import topology, valkey
from quire.supervisor.child import ChildSpec
from quire.supervisor.models import ROLES, ModelOptions
from quire.supervisor.options import ServeOptions
from quire.supervisor.preflight import specs_to_check
from services.runtime.config import ServiceSettings

RUN = Path("/dev/shm/quire-1000/50051-a1b2c3d4")


def options(**changes: object) -> ServeOptions:
    return ServeOptions(**changes)  # type: ignore[arg-type]


def services(asked: ServeOptions) -> tuple[ChildSpec, ...]:
    """The services of one model with these options."""
    model = ModelOptions(
        "tiny",
        Path("/models/tiny"),
        asked.num_prefill,
        asked.num_decode,
        settings=asked.settings(WorkerOptions),
    )
    return topology.services(asked, [model], RUN)


def names(asked: ServeOptions) -> list[str]:
    return [spec.name for spec in services(asked)]


def test_a_run_has_one_service_of_each_role_by_default() -> None:
    assert names(options()) == ["block-manager", "prefill-1", "decode-1", "gateway"]


def test_a_run_has_as_many_workers_as_asked() -> None:
    asked = options(num_prefill=2, num_decode=3)
    workers = ["prefill-1", "prefill-2", "decode-1", "decode-2", "decode-3"]
    assert names(asked) == ["block-manager", *workers, "gateway"]


def test_workers_that_mix_need_no_prefill_workers() -> None:
    assert names(options(mix=True)) == ["block-manager", "decode-1", "gateway"]
    asked = options(mix=True, num_prefill=1, num_decode=2)
    assert names(asked) == ["block-manager", "prefill-1", "decode-1", "decode-2", "gateway"]
    decode = services(options(mix=True, num_decode=2))[1].environment
    assert decode["QUIRE_DECODE_MIX"] == "true"
    assert decode["QUIRE_DECODE_NUM_EXPECTED_WORKERS"] == "2"
    mixed = {"MIX": "true"}
    assert ModelOptions("m", Path("/m"), 0, settings=mixed).roles_elsewhere == []
    assert ModelOptions("m", Path("/m"), 0).roles_elsewhere == ["prefill"]
    assert ModelOptions("m", Path("/m"), 0, 0, settings=mixed).roles_elsewhere == [*ROLES]


def test_the_first_gateway_reads_the_metrics_of_all_services() -> None:
    found = {spec.name: spec.variables for spec in services(options(num_decode=2, num_gateways=2))}
    directory = f"{RUN}/metrics"
    assert "QUIRE_GATEWAY_METRICS_SOCKET" not in found["gateway"]
    for name, variable, file in (
        ("gateway-2", "GATEWAY", "gateway-2.sock"),
        ("decode-2", "DECODE", "decode-2.sock"),
        ("block-manager", "BLOCK_MANAGER", "block-manager-1.sock"),
    ):
        assert found[name][f"QUIRE_{variable}_METRICS_SOCKET"] == f"{directory}/{file}"


def test_a_mover_and_the_address_of_other_hosts() -> None:
    asked = options(redis_url="redis://h", service_host="10.0.0.1", num_prefill=0, num_decode=2)
    assert names(asked) == ["block-manager", "decode-1", "decode-2", "mover", "gateway"]
    by_name = {spec.name: spec.environment for spec in services(asked)}
    assert by_name["mover"]["QUIRE_MOVER_HOST"] == "10.0.0.1"
    assert by_name["decode-1"]["QUIRE_DECODE_HOST"] == "10.0.0.1"
    assert by_name["gateway"]["QUIRE_GATEWAY_HOST"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("changes", "has_movers"),
    [
        ({}, False),
        ({"redis_url": "redis://h"}, False),
        ({"service_host": "10.0.0.1"}, False),
        ({"redis_url": "redis://h", "service_host": "10.0.0.1"}, True),
        ({"redis_url": "redis://h", "service_host": "10.0.0.1", "device": "cuda:0"}, False),
        ({"redis_url": "redis://h", "service_host": "10.0.0.1", "mover": False}, False),
        ({"mover": True}, True),
    ],
)
def test_hosts_of_one_deployment_have_movers(changes: dict[str, Any], has_movers: bool) -> None:
    assert options(**changes).has_movers is has_movers


def test_services_of_several_hosts_share_a_secret_and_certificates() -> None:
    asked = options(secret_file=Path("/etc/quire/secret"), service_tls=Path("/etc/quire/tls"))
    for spec in services(asked):
        (prefix,) = {name.removesuffix("RUN_DIR") for name in spec.environment if "RUN_DIR" in name}
        assert spec.environment[f"{prefix}SECRET_FILE"] == "/etc/quire/secret"
        assert spec.environment[f"{prefix}TLS_CA"] == "/etc/quire/tls/ca.crt"
        assert spec.environment[f"{prefix}TLS_CERT"] == "/etc/quire/tls/service.crt"
        assert spec.environment[f"{prefix}TLS_KEY"] == "/etc/quire/tls/service.key"


def test_gateways_have_consecutive_ports() -> None:
    asked = options(num_gateways=3, grpc_port=7000, http_port=8000)
    assert names(asked)[-3:] == ["gateway", "gateway-2", "gateway-3"]
    ports = [
        (spec.environment["QUIRE_GATEWAY_PORT"], spec.environment["QUIRE_GATEWAY_HTTP_PORT"])
        for spec in services(asked)[-3:]
    ]
    assert ports == [("7000", "8000"), ("7001", "8001"), ("7002", "8002")]


def test_priorities_are_refused_unless_they_are_asked_for() -> None:
    settings = [services(options(client_priority=asked))[-1].environment for asked in (False, True)]
    assert [each.get("QUIRE_GATEWAY_CLIENT_PRIORITY") for each in settings] == [None, "true"]


def test_a_port_of_a_role_is_that_of_its_first_member(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 means a free port for each; a flag has precedence."""
    monkeypatch.setenv("QUIRE_DECODE_METRICS_PORT", "9092")
    monkeypatch.setenv("QUIRE_PREFILL_METRICS_PORT", "0")
    monkeypatch.setenv("QUIRE_PREFILL_PORT", "7100")
    monkeypatch.setenv("QUIRE_GATEWAY_METRICS_PORT", "9200")
    monkeypatch.setenv("QUIRE_GATEWAY_PORT", "1")
    asked = options(num_prefill=2, num_decode=2, num_gateways=2, grpc_port=7000)
    ports = {
        spec.name: [
            f"{name.removeprefix('QUIRE_')}={value}"
            for name, value in spec.variables.items()
            if name.endswith("_PORT")
        ]
        for spec in services(asked)
    }
    assert ports == {
        "block-manager": [],
        "prefill-1": ["PREFILL_PORT=7100"],
        "prefill-2": ["PREFILL_PORT=7101"],
        "decode-1": ["DECODE_METRICS_PORT=9092"],
        "decode-2": ["DECODE_METRICS_PORT=9093"],
        "gateway": ["GATEWAY_PORT=7000", "GATEWAY_HTTP_PORT=8000", "GATEWAY_METRICS_PORT=9200"],
        "gateway-2": ["GATEWAY_PORT=7001", "GATEWAY_HTTP_PORT=8001", "GATEWAY_METRICS_PORT=9201"],
    }


def test_no_store_is_started_where_one_is_named() -> None:
    asked = options(redis_url="redis://elsewhere:6379")
    assert topology.store(asked, RUN) is None
    for spec in services(asked):
        assert "redis://elsewhere:6379" in spec.environment.values()


def test_a_setting_that_nobody_asked_for_is_left_to_the_service() -> None:
    (decode,) = (s for s in services(options()) if s.name == "decode-1")
    assert "QUIRE_DECODE_POOL_MEMORY" not in decode.environment
    assert decode.environment["QUIRE_DECODE_NUM_EXPECTED_WORKERS"] == "2"


def test_workers_divide_the_cpus_unless_their_threads_are_given() -> None:
    for asked, expected in [
        (options(), {}),
        (options(cpus="0-3"), {"QUIRE_DECODE_CPUS": "0-3"}),
        (options(threads=5), {"QUIRE_DECODE_THREADS": "5"}),
    ]:
        (decode,) = (s for s in services(asked) if s.name == "decode-1")
        names = {"QUIRE_DECODE_CPUS", "QUIRE_DECODE_THREADS"}
        assert {
            name: decode.environment[name] for name in names & set(decode.environment)
        } == expected


def test_services_know_how_long_they_are_waited_for() -> None:
    """Running requests get all of --drain-time: services keep `ENDING_S` for themselves."""
    for spec in services(options(drain_time=30.0)):
        (grace_s,) = (v for name, v in spec.environment.items() if name.endswith("_STOP_GRACE_S"))
        assert ServiceSettings(stop_grace_s=float(grace_s)).request_grace_s == 30.0


def test_the_store_has_no_network_port_and_keeps_nothing() -> None:
    text = " ".join(valkey.command(RUN))
    assert "--port 0 " in text
    assert "--save  --appendonly no --maxmemory-policy noeviction" in text


def test_several_models_have_workers_of_their_own_on_different_ports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUIRE_DECODE_METRICS_PORT", "9092")
    models = [
        ModelOptions("a", Path("/a"), 1, 2, ("default",), {"POOL_MEMORY": "1GiB"}),
        ModelOptions("org/b", Path("/b"), 1, 1),
    ]
    asked = options(mover=True)
    specs = {spec.name: spec for spec in topology.services(asked, models, RUN)}
    workers = ["prefill-1", "prefill-2", "decode-1", "decode-2", "decode-3"]
    movers = ["mover-1", "mover-2"]
    assert list(specs) == ["block-manager", *workers, *movers, "gateway"]
    assert [specs[name].variables["QUIRE_MOVER_MODEL_NAME"] for name in movers] == ["a", "org/b"]
    variables = [specs[name].variables for name in workers[2:]]
    assert [each["QUIRE_DECODE_METRICS_PORT"] for each in variables] == ["9092", "9093", "9094"]
    assert [each["QUIRE_DECODE_WORKER_NUMBER"] for each in variables] == ["1", "2", "3"]
    assert [each["QUIRE_DECODE_MODEL"] for each in variables] == ["/a", "/a", "/b"]
    assert [each.get("QUIRE_DECODE_POOL_MEMORY") for each in variables] == ["1GiB", "1GiB", None]
    assert {each["QUIRE_DECODE_NUM_EXPECTED_WORKERS"] for each in variables} == {"5"}
    assert specs["gateway"].environment["QUIRE_GATEWAY_MODEL_ALIASES"] == "default=a"


def checked(**changes: object) -> list[str]:
    """The services that check the options of two models' run before any service starts."""
    asked = options(num_gateways=2, **changes)
    models = [ModelOptions(name, Path(f"/{name}"), 1, 2) for name in ("a", "b")]
    return [spec.name for spec in specs_to_check(asked, topology.services(asked, models, RUN))]


def test_one_worker_of_each_model_checks_the_options_of_workers() -> None:
    assert checked(quantize="int8") == ["prefill-1", "prefill-2"]
    assert checked(own=["a.quantize=int8"]) == ["prefill-1", "prefill-2"]


def test_one_gateway_checks_the_options_of_gateways() -> None:
    assert checked(public_tls_cert=Path("nope")) == ["gateway"]


def test_options_that_nobody_has_chosen_are_not_checked() -> None:
    """The check of a model's files is another one."""
    assert checked() == []
