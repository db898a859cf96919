"""docker-compose.yml is valid, and meets the requirements of services and pools."""

import os
import re
from typing import Any

import pytest

from services.runtime.config import ServiceSettings
from tests.compose import CLASSES, compose_file, settings_in
from tests.programs import BIN, ROOT, run


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


@pytest.mark.parametrize("file", ["docker-compose.yml", "deploy/gpu.yml", "deploy/host.yml"])
def test_one_service_builds_an_image(file: str) -> None:
    """Compose labels an image with the service that builds it: with two of them `up --scale` would
    take the containers of one for outdated, and recreate them."""
    services = compose_file(file)["services"].values()
    built = [each["image"] for each in services if "build" in each]
    assert sorted(built) == sorted(set(built))
    used = {each["image"] for each in services if each.get("image", "").startswith("quire-")}
    assert used == set(built)


def test_every_service_understands_its_environment(settings: dict[str, ServiceSettings]) -> None:
    for name, loaded in settings.items():
        assert loaded.redis_url == "redis://quire@redis:6379/0", name
        # Others reach it by its container's name on the network, which is its hostname.
        assert (loaded.host, loaded.advertise_host) == ("0.0.0.0", None), name
        assert loaded.address(50051).partition(":")[0] == os.uname().nodename


def test_the_example_environment_names_every_variable_with_its_default() -> None:
    files = "docker-compose.yml", "deploy/gpu.yml", "deploy/host.yml"
    text = "".join((ROOT / file).read_text() for file in files)
    used = dict(re.findall(r"\$\{(\w+):-([^}]*)\}", text))
    example = (ROOT / "deploy" / "env.example").read_text()
    documented = dict(re.findall(r"^#(\w+)=(.*)$", example, re.MULTILINE))
    assert documented.keys() == used.keys()
    assert documented | {"QUIRE_MODELS_DIR": "models"} == used
