"""The compose files as `docker compose` reads them, and the settings that a service reads from
one."""

import os
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import pytest
import yaml  # type: ignore[import-untyped]

from services.block_manager.config import BlockManagerSettings
from services.gateway.config import GatewaySettings
from services.runtime.config import ServiceSettings, load_settings
from services.worker.config import DecodeSettings, PrefillSettings
from tests.programs import ROOT

CLASSES: dict[str, type[ServiceSettings]] = {
    "block-manager": BlockManagerSettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "gateway": GatewaySettings,
}
EMPTY: Mapping[str, str] = MappingProxyType({})

Settings = TypeVar("Settings", bound=ServiceSettings)


def compose_file(path: str, env: Mapping[str, str] = EMPTY) -> Any:
    """The file with the variables `env`; another variable has its default."""
    return _interpolated(yaml.safe_load((ROOT / path).read_text()), env)


def _interpolated(node: Any, env: Mapping[str, str]) -> Any:
    if isinstance(node, dict):
        return {key: _interpolated(value, env) for key, value in node.items()}
    if isinstance(node, list):
        return [_interpolated(item, env) for item in node]
    if not isinstance(node, str):
        return node
    text = re.sub(
        r"\$\{(\w+):(?:-([^}]*)|\?[^}]*)\}", lambda found: env.get(found[1], found[2]), node
    )
    assert "$" not in text, f"a variable without a default: {node}"
    return text


def settings_in(
    monkeypatch: pytest.MonkeyPatch, settings_class: type[Settings], environment: Mapping[str, str]
) -> Settings:
    """The settings that a service has in this environment."""
    with monkeypatch.context() as patch:
        for variable in [name for name in os.environ if name.startswith("QUIRE_")]:
            patch.delenv(variable)
        for variable, value in environment.items():
            patch.setenv(variable, value)
        return load_settings(settings_class)
