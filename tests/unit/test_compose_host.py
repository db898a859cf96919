"""deploy/host.yml runs the parts of one host of several beside docker-compose.yml."""

from typing import Any

import pytest

from services.mover.config import MoverSettings
from tests.compose import compose_file, settings_in


@pytest.fixture(scope="module")
def compose() -> Any:
    return compose_file("docker-compose.yml")


@pytest.fixture(scope="module")
def host() -> Any:
    return compose_file("deploy/host.yml")


def test_a_host_runs_the_parts_that_its_profiles_name(compose: Any, host: Any) -> None:
    """Every other service is off, and nothing that runs waits for one that may be off: Redis is on
    one host, and both roles need the block manager, the preflight and the mover."""
    roles = ["prefill", "decode"]
    profiles = {name: service["profiles"] for name, service in host["services"].items()}
    assert profiles == {
        "credentials": ["store"],
        "redis": ["store"],
        "gateway": ["gateway"],
        "block-manager": roles,
        "preflight": roles,
        "prefill": ["prefill"],
        "decode": ["decode"],
        "mover": roles,
    }
    profile_less = {name for name, each in compose["services"].items() if "profiles" not in each}
    assert profile_less <= profiles.keys()
    for name, service in host["services"].items():
        waits_for = compose["services"].get(name, {}).get("depends_on", {})
        waits_for = waits_for | service.get("depends_on", {})
        for other, condition in waits_for.items():
            is_on = set(profiles[name]) <= set(profiles[other])
            assert is_on or condition.get("required") is False, (name, other)
    assert host["networks"] == {"default": {"name": "quire", "external": True}}


def test_a_host_takes_its_credentials_from_a_directory() -> None:
    """On the host that makes them, they are in the volume `run`."""
    for directory, place in (({}, "run"), ({"QUIRE_CREDENTIALS_DIR": "/etc/quire"}, "/etc/quire")):
        services = compose_file("deploy/host.yml", directory)["services"]
        for name in ("block-manager", "preflight", "prefill", "decode", "mover"):
            assert services[name]["volumes"][0] == f"{place}:/run/quire:ro", name
        assert services["gateway"]["volumes"] == [f"{place}:/run/quire"]


def test_a_mover_is_a_service_like_the_others(
    compose: Any, host: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It shares the pool and the processes' numbers with the block manager, which waits until a
    dead mover has exited."""
    mover, manager = host["services"]["mover"], compose["services"]["block-manager"]
    same = "restart init read_only tmpfs cap_drop security_opt stop_grace_period healthcheck"
    for field in same.split():
        assert mover[field] == manager[field], field
    assert "pools:/pools" in mover["volumes"]
    assert (mover["pid"], host["services"]["block-manager"]["pid"]) == ("host", "host")
    assert mover["build"]["target"] == "mover"
    environment = {
        name.replace("QUIRE_MOVER_", "QUIRE_BLOCK_MANAGER_"): value
        for name, value in mover["environment"].items()
        if name.startswith("QUIRE_")
    }
    assert environment == manager["environment"]
    assert settings_in(monkeypatch, MoverSettings, mover["environment"]).port == 50051
