"""Settings come from the environment only; an error names the variable of every mistake."""

from pathlib import Path
from typing import ClassVar

import pytest
from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import SettingsConfigDict

from blockstore.redaction import without_password
from services.runtime.config import (
    PoolServiceSettings,
    ServiceSettings,
    chosen,
    load_settings,
    resolved,
    variables,
)
from services.runtime.errors import StartupError


class CookSettings(PoolServiceSettings):
    model_config = SettingsConfigDict(env_prefix="QUIRE_COOK_")
    service: ClassVar[str] = "cook"

    num_pans: int = Field(default=2, ge=1, description="pans on the stove")
    secret: SecretStr = SecretStr("salt")


def test_fields_come_from_prefixed_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_COOK_NUM_PANS", "5")
    monkeypatch.setenv("QUIRE_COOK_METRICS_PORT", "0")
    settings = load_settings(CookSettings)
    assert (settings.num_pans, settings.metrics_port, settings.port) == (5, 0, 0)


def test_the_pool_root_is_under_the_run_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it is given."""
    monkeypatch.setenv("QUIRE_COOK_RUN_DIR", "/dev/shm/quire-1/a")
    assert load_settings(CookSettings).pool_root == Path("/dev/shm/quire-1/a/pools")
    monkeypatch.setenv("QUIRE_COOK_POOL_ROOT", "/pools")
    assert load_settings(CookSettings).pool_root == Path("/pools")


def test_a_misspelt_variable_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_COOK_NUM_PAN", "5")
    with pytest.raises(
        StartupError,
        match=r"QUIRE_COOK_NUM_PAN is not a setting \(did you mean QUIRE_COOK_NUM_PANS\?\)",
    ):
        load_settings(CookSettings)


def test_other_services_variables_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_WAITER_TIPS", "5")
    monkeypatch.setenv("QUIRE_PARENT_FD", "3")
    assert load_settings(CookSettings).num_pans == 2


def test_every_wrong_value_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them in one message, each with its variable and the reason."""
    monkeypatch.setenv("QUIRE_COOK_NUM_PANS", "0")
    monkeypatch.setenv("QUIRE_COOK_PORT", "many")
    monkeypatch.setenv("QUIRE_COOK_LOG_LEVEL", "loud")
    with pytest.raises(StartupError) as caught:
        load_settings(CookSettings)
    for part in (
        "QUIRE_COOK_NUM_PANS: Input should be greater than or equal to 1",
        "QUIRE_COOK_PORT: Input should be a valid integer",
        "QUIRE_COOK_LOG_LEVEL: Input should be 'debug', 'info', 'warning' or 'error'",
    ):
        assert part in str(caught.value)


def test_settings_do_not_change() -> None:
    settings = load_settings(CookSettings)
    with pytest.raises(ValidationError):
        settings.num_pans = 3


def test_resolved_settings_can_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Secrets are left out."""
    monkeypatch.setenv("QUIRE_COOK_REDIS_URL", "redis://me:hush@db:6379/1")
    shown = resolved(load_settings(CookSettings))
    assert shown["QUIRE_COOK_REDIS_URL"] == "redis://me:***@db:6379/1"
    assert shown["QUIRE_COOK_SECRET"] == "**********"
    assert shown["QUIRE_COOK_METRICS_PORT"] == "none"
    assert shown.keys() == variables(CookSettings).keys()


def test_the_settings_that_a_service_logs_are_those_that_were_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With their types, without secrets, and without default values."""
    for name, value in {
        "NUM_PANS": "5",
        "HOST": "127.0.0.1",
        "RUN_DIR": "/dev/shm/x",
        "SECRET": "hush",
        "REDIS_URL": "redis://me:hush@db:6379/1",
    }.items():
        monkeypatch.setenv(f"QUIRE_COOK_{name}", value)
    assert chosen(load_settings(CookSettings)) == {
        "redis_url": "redis://me:***@db:6379/1",
        "run_dir": "/dev/shm/x",
        "secret": "**********",
        "num_pans": 5,
    }


def test_every_common_setting_is_explained() -> None:
    assert [name for name, text in variables(PoolServiceSettings).items() if not text] == []


@pytest.mark.parametrize(
    ("host", "advertise_host", "address"),
    [
        ("127.0.0.1", None, "127.0.0.1:5"),
        ("0.0.0.0", None, "kitchen:5"),
        ("0.0.0.0", "10.1.2.3", "10.1.2.3:5"),
        ("::1", None, "[::1]:5"),
    ],
)
def test_advertised_addresses_are_reachable(
    monkeypatch: pytest.MonkeyPatch, host: str, advertise_host: str | None, address: str
) -> None:
    """An advertised address is never a wildcard."""
    monkeypatch.setattr("socket.gethostname", lambda: "kitchen")
    settings = ServiceSettings(host=host, advertise_host=advertise_host)
    assert settings.address(5) == address


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("unix:///run/redis.sock", "unix:///run/redis.sock"),
        ("redis://:p%40ss@h:1", "redis://:***@h:1"),
        ("redis://h:1/0?db=2", "redis://h:1/0?db=2"),
        ("redis://h:1/0?password=p&db=2", "redis://h:1/0?password=***&db=2"),
        ("redis://u:p@h:1?Pass%77ord=p", "redis://u:***@h:1?Pass%77ord=***"),
        ("rediss://h:1?ssl_password=p", "rediss://h:1?ssl_password=***"),
        ("unix://u@/run/r.sock?password=p%26q", "unix://u@/run/r.sock?password=***"),
        ("redis://h:1/0?password=p@q", "redis://h:1/0?password=***"),
        ("redis://:p/q@h:1", "redis://:***@h:1"),
        ("redis://:p?q@h:1", "redis://:***@h:1"),
    ],
)
def test_passwords_are_blanked(url: str, shown: str) -> None:
    assert without_password(url) == shown
