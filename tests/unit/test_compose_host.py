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
