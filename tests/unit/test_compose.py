"""docker-compose.yml is valid, and meets the requirements of services and pools."""

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from services.common.rpc.tls import TlsFiles, service_tls
from services.common.runtime.config import PoolServiceSettings, ServiceSettings
from services.credentials.__main__ import ACL_FILE, PASSWORD_FILE, TLS_DIR, CredentialsSettings
from services.worker.config import WorkerSettings
from tests.compose import CLASSES, OURS, compose_file, settings_in
from tests.programs import BIN, DOCKERFILE, ROOT, run

POOL_USERS = ("block-manager", "prefill", "decode")


@pytest.fixture(scope="module")
def compose() -> Any:
    return compose_file("docker-compose.yml")


@pytest.fixture
def settings(compose: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, ServiceSettings]:
    """The settings of each service, read from its environment by its own class."""
    services = compose["services"]
    return {
        name: settings_in(monkeypatch, settings_class, services[name]["environment"])
        for name, settings_class in CLASSES.items()
    }


@pytest.mark.parametrize(
    "file",
    [
        "docker-compose.yml",
        "deploy/gpu.yml",
        "deploy/host.yml",
        "deploy/second-model.yml",
        "deploy/start-interval.yml",
        "deploy/valkey-tls.yml",
    ],
)
def test_the_compose_files_follow_the_specification(file: str) -> None:
    command = ["check-jsonschema", "--builtin-schema", "vendor.compose-spec", file]
    run(BIN / command[0], *command[1:])


def test_valkey_with_tls_is_the_same_valkey_and_all_services_use_it(compose: Any) -> None:
    file = compose_file("deploy/valkey-tls.yml")["services"]
    plain, over_tls = compose["services"]["redis"]["command"], file["redis"]["command"]
    assert [word for word in over_tls if word in plain] == plain
    assert file.keys() == {"redis", "preflight", *OURS}
    for name in OURS:
        ((variable, url),) = file[name]["environment"].items()
        assert compose["services"][name]["environment"][variable] == "redis://quire@redis:6379/0"
        assert url.startswith("rediss://quire@redis:6379/0?")


def test_the_store_keeps_nothing_and_evicts_nothing(compose: Any) -> None:
    command = " ".join(compose["services"]["redis"]["command"])
    assert command.startswith(
        "valkey-server --save  --appendonly no --maxmemory-policy noeviction "
    )


def test_credentials_are_made_before_anybody_needs_them(
    compose: Any, settings: dict[str, ServiceSettings]
) -> None:
    """One service writes them into a volume that all others may only read, except for the gateway,
    whose socket for operations is there too."""
    maker = compose["services"]["credentials"]
    assert (maker["volumes"], maker["restart"]) == (
        ["run:/run/quire", "authority:/authority"],
        "no",
    )
    redis = compose["services"]["redis"]
    # A service that stays has to wait for it, or `up --wait` takes its end for a failure.
    assert redis["depends_on"] == {"credentials": {"condition": "service_completed_successfully"}}
    run_dir = Path(maker["environment"]["QUIRE_CREDENTIALS_RUN_DIR"])
    assert redis["command"][-2:] == ["--aclfile", str(run_dir / ACL_FILE)]
    assert redis["user"] == "10001:10001"  # the images' user, who wrote it for himself only
    for name, loaded in settings.items():
        assert (loaded.run_dir, loaded.secret, loaded.secret_file) == (run_dir, None, None), name
        assert loaded.redis_password_file == run_dir / PASSWORD_FILE, name
        files = TlsFiles(*(run_dir / TLS_DIR / f for f in ("service.crt", "service.key", "ca.crt")))
        assert service_tls(loaded) == files, name
    assert maker["environment"]["QUIRE_CREDENTIALS_CA_KEY"] == "/authority/ca.key"
    assert not any("authority" in str(compose["services"][name]["volumes"]) for name in OURS)
    for name in ("redis", "block-manager", "prefill", "decode"):
        assert "run:/run/quire:ro" in compose["services"][name]["volumes"]
    assert "run:/run/quire" in compose["services"]["gateway"]["volumes"]
    assert compose["services"]["gateway"]["environment"]["QUIRE_RUN"] == str(run_dir)


@pytest.mark.parametrize("given", [{}, {"QUIRE_SECRET": 32 * "s", "QUIRE_REDIS_PASSWORD": "pw"}])
def test_the_credentials_service_understands_its_environment(
    given: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    services = compose_file("docker-compose.yml", given)["services"]
    environment = services["credentials"]["environment"]
    loaded = settings_in(monkeypatch, CredentialsSettings, environment)
    assert (loaded.secret is None, loaded.redis_password is None) == (not given, not given)


def test_every_service_understands_its_environment(settings: dict[str, ServiceSettings]) -> None:
    for name, loaded in settings.items():
        assert loaded.redis_url == "redis://quire@redis:6379/0", name
        # Others reach it by its container's name on the network, which is its hostname.
        assert (loaded.host, loaded.advertise_host) == ("0.0.0.0", None), name
        assert loaded.address(50051).partition(":")[0] == os.uname().nodename


def test_all_workers_and_the_block_manager_share_one_pool_directory(
    compose: Any, settings: dict[str, ServiceSettings]
) -> None:
    for name in POOL_USERS:
        loaded = settings[name]
        assert isinstance(loaded, PoolServiceSettings)
        assert str(loaded.pool_root) == "/pools"
        assert "pools:/pools" in compose["services"][name]["volumes"]


def test_workers_keep_packed_weights_in_a_volume_of_the_images_user(
    compose: Any, settings: dict[str, ServiceSettings]
) -> None:
    for name in ("prefill", "decode"):
        loaded = settings[name]
        assert isinstance(loaded, WorkerSettings)
        assert str(loaded.weights_cache) == "/weights"
        assert "weights:/weights" in compose["services"][name]["volumes"]
    assert "/run/quire /pools /weights" in DOCKERFILE.read_text()


def test_the_pool_directory_is_a_private_tmpfs_of_the_images_user(compose: Any) -> None:
    options = compose["volumes"]["pools"]["driver_opts"]
    assert (options["type"], options["device"]) == ("tmpfs", "tmpfs")
    wanted = dict(item.split("=") for item in options["o"].split(","))
    assert wanted == {"size": "100%", "uid": "10001", "gid": "10001", "mode": "0700"}
    assert "USER 10001:10001" in DOCKERFILE.read_text()


def test_the_volumes_do_not_depend_on_settings() -> None:
    """A volume keeps the options that it was made with, so a changed setting would have no
    effect."""
    text = (ROOT / "docker-compose.yml").read_text()
    assert "$" not in text.partition("\nvolumes:")[2]


def test_the_store_can_write_its_working_directory(compose: Any) -> None:
    redis = compose["services"]["redis"]
    assert redis["user"] == "10001:10001"
    assert redis["tmpfs"] == ["/data:uid=10001,gid=10001,mode=0700"]


def test_workers_start_once_a_preflight_has_checked_the_settings_of_prefill(compose: Any) -> None:
    services = compose["services"]
    preflight, prefill = services["preflight"], services["prefill"]
    assert preflight["command"] == [*prefill["command"], "--check"]
    assert preflight["restart"] == "no"
    for field in ("image", "environment", "volumes"):
        assert preflight[field] == prefill[field], field
    for name in ("prefill", "decode"):
        condition = services[name]["depends_on"]["preflight"]
        assert condition == {"condition": "service_completed_successfully"}


def test_prefill_and_decode_make_the_same_pool(settings: dict[str, ServiceSettings]) -> None:
    prefill, decode = settings["prefill"], settings["decode"]
    assert isinstance(prefill, WorkerSettings)
    assert isinstance(decode, WorkerSettings)
    pool = "model model_name dtype backend block_size pool_memory swap_memory preemption quantize"
    for field in pool.split():
        assert getattr(prefill, field) == getattr(decode, field), field


def test_on_a_gpu_all_that_touch_a_pool_see_its_device_and_each_others_processes(
    compose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All use one user and one volume for the keeper's socket, as on the CPU, and one PID
    namespace, which NVML lists; no other service does."""
    gpu = compose_file("deploy/gpu.yml")["services"]
    assert gpu.keys() == {"preflight", *POOL_USERS}
    for name, service in gpu.items():
        assert service["pid"] == "host", name
        (device,) = service["deploy"]["resources"]["reservations"]["devices"]
        assert device == {"driver": "nvidia", "device_ids": ["0"], "capabilities": ["gpu"]}
        assert "pools:/pools" in compose["services"][name]["volumes"]
        assert "user" not in service | compose["services"][name], "the images' one user"
        target = "control-gpu" if name == "block-manager" else "worker-cuda"
        assert service["build"]["target"] == target
    assert gpu["preflight"] == gpu["prefill"]
    for name in ("prefill", "decode"):
        merged = compose["services"][name]["environment"] | gpu[name]["environment"]
        settings = settings_in(monkeypatch, CLASSES[name], merged)
        assert isinstance(settings, WorkerSettings)
        assert (settings.device, settings.kernels) == ("cuda:0", "triton")
        assert (settings.gpu_memory_utilization, settings.pool_bytes) == (0.9, None)
        assert merged["TRITON_CACHE_DIR"].startswith("/weights/")


def test_workers_can_be_scaled(compose: Any) -> None:
    for name in OURS:
        service = compose["services"][name]
        assert "container_name" not in service
        assert ("ports" in service) == (name == "gateway")
    ports = compose["services"]["gateway"]["ports"]
    assert ports == ["127.0.0.1:50051:50051", "127.0.0.1:8000:8000"]


def test_several_gateways_have_a_port_each_as_the_documentation_scales_them() -> None:
    """A range of ports on the host for one port of the containers, with as many ports as
    gateways."""
    text = (ROOT / "docs" / "operations" / "scaling.md").read_text()
    (command,) = re.findall(r"^(QUIRE_.*) docker compose up --scale gateway=2$", text, re.MULTILINE)
    env = dict(setting.split("=") for setting in command.split())
    ports = compose_file("docker-compose.yml", env)["services"]["gateway"]["ports"]
    found = [re.fullmatch(r"127\.0\.0\.1:(\d+)-(\d+):(\d+)", port) for port in ports]
    ranges = [tuple(map(int, port.groups())) for port in found if port]
    assert ranges == [(50051, 50052, 50051), (8000, 8001, 8000)]


@pytest.mark.parametrize("password", ["", "secret"])
def test_monitoring_is_on_this_host_only_and_has_no_default_password(
    tmp_path: Path, password: str
) -> None:
    services = compose_file("docker-compose.yml", {"QUIRE_GRAFANA_PASSWORD": password})["services"]
    for name in ("prometheus", "grafana"):
        assert all(port.startswith("127.0.0.1:") for port in services[name]["ports"])
    grafana = services["grafana"]
    *shell, script = grafana["entrypoint"]
    started = tmp_path / "started"
    started.write_text("#!/bin/sh\necho started\n")
    started.chmod(0o700)
    ended = subprocess.run(
        [*shell, script.replace("/run.sh", str(started))],
        env={"PATH": "/usr/bin:/bin", **grafana["environment"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stdout.strip()) == (
        (0, "started")
        if password
        else (1, "set QUIRE_GRAFANA_PASSWORD, the password of the user admin")
    )


def test_only_workers_carry_torch(compose: Any) -> None:
    targets = {name: compose["services"][name]["build"]["target"] for name in OURS}
    roles = {"prefill": "worker", "decode": "worker"}
    assert targets == {"block-manager": "control", **roles, "gateway": "control"}


@pytest.mark.parametrize("name", ["redis", *OURS])
def test_every_service_is_checked_confined_and_given_time_to_end(compose: Any, name: str) -> None:
    service = compose["services"][name]
    assert service["restart"] == "unless-stopped"
    assert service["init"] is True
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["stop_grace_period"] in ("5s", "20s")
    assert service["healthcheck"]["test"][0] == "CMD"


@pytest.mark.parametrize("name", OURS)
def test_the_health_check_probes_the_metrics_port(
    compose: Any, settings: dict[str, ServiceSettings], name: str
) -> None:
    command = compose["services"][name]["healthcheck"]["test"]
    assert command == ["CMD", "quire-probe", str(settings[name].metrics_port)]
    assert "quire/probe.py /package/usr/local/bin/quire-probe" in DOCKERFILE.read_text()


def test_only_the_file_for_newer_engines_has_a_start_interval() -> None:
    """Compose refuses it for an engine before 25."""
    assert "start_interval:" not in (ROOT / "docker-compose.yml").read_text()
    services = compose_file("deploy/start-interval.yml")["services"]
    assert services.keys() == {"redis", *OURS}
    for service in services.values():
        assert service == {"healthcheck": {"interval": "30s", "start_interval": "1s"}}


@pytest.mark.parametrize("name", OURS)
def test_a_service_has_longer_to_end_than_it_takes(
    compose: Any, settings: dict[str, ServiceSettings], name: str
) -> None:
    grace_s = float(compose["services"][name]["stop_grace_period"].removesuffix("s"))
    assert settings[name].stop_grace_s < grace_s


def test_the_example_environment_names_every_variable_with_its_default() -> None:
    files = "docker-compose.yml", "deploy/gpu.yml", "deploy/host.yml"
    text = "".join((ROOT / file).read_text() for file in files)
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    example = (ROOT / "deploy" / "env.example").read_text()
    documented = dict(re.findall(r"^#(\w+)=(.*)$", example, re.MULTILINE))
    assert documented.keys() == used.keys()
    assert documented | {"QUIRE_MODELS_DIR": "models"} == used


def test_a_second_model_has_workers_of_its_own(
    compose: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are those of the first model, except for the model, its name and its pool's size. They
    start after a preflight of their own, so `up` fails if the model does not exist."""
    given = {"QUIRE_SECOND_MODEL": "/models/local/big", "QUIRE_SECOND_POOL_MEMORY": "2GiB"}
    second = compose_file("deploy/second-model.yml", given)["services"]
    assert set(second) == {"preflight-second", "prefill-second", "decode-second"}
    for name, service in second.items():
        role = name.removesuffix("-second")
        assert service["extends"] == {"file": "docker-compose.yml", "service": role}
        if role == "preflight":
            assert service["environment"] == second["prefill-second"]["environment"]
            continue
        waits = {"preflight-second": {"condition": "service_completed_successfully"}}
        assert service["depends_on"] == waits
        variables = compose["services"][role]["environment"] | service["environment"]
        assert variables.keys() == compose["services"][role]["environment"].keys()
        settings = settings_in(monkeypatch, CLASSES[role], variables)
        assert isinstance(settings, WorkerSettings)
        assert (settings.model, settings.pool_memory) == (Path("/models/local/big"), "2GiB")
