"""docker-compose.yml is valid, and meets the requirements of services and pools."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

from services.credentials.__main__ import ACL_FILE, PASSWORD_FILE, TLS_DIR, CredentialsSettings
from services.runtime.config import PoolServiceSettings, ServiceSettings
from services.runtime.rpc.tls import TlsFiles, service_tls
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


@pytest.mark.parametrize("name", OURS)
def test_the_health_check_probes_the_metrics_port(
    compose: Any, settings: dict[str, ServiceSettings], name: str
) -> None:
    command = compose["services"][name]["healthcheck"]["test"]
    assert command == ["CMD", "quire-probe", str(settings[name].metrics_port)]
    assert "quire/probe.py /package/usr/local/bin/quire-probe" in DOCKERFILE.read_text()


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
