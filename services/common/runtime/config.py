"""Settings of a service: one frozen class, read from the environment only, resolved once at start.

A variable is the service's prefix and the field's name (`QUIRE_GATEWAY_PORT`). A variable with the
prefix that names no field is an error: a misspelt setting must not silently become a default.
"""

import difflib
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Literal, TypeVar
from urllib.parse import unquote, urlsplit, urlunsplit

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from services.common.errors import StartupError

ENDING_S = 5.0
"""Of what a service may take to end after SIGTERM: for what comes after its running requests."""

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "console", "json"]

_WILDCARD_HOSTS = frozenset({"", "0.0.0.0", "::"})


def _default_run_dir() -> Path:
    return Path(f"/dev/shm/quire-{os.getuid()}/default")


class ServiceSettings(BaseSettings):
    """What every service has. A subclass names its role, and its prefix in `model_config`:

    class GatewaySettings(ServiceSettings):
        model_config = SettingsConfigDict(env_prefix="QUIRE_GATEWAY_")
        service: ClassVar[str] = "gateway"
    """

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", validate_default=True, env_parse_none_str="none"
    )

    service: ClassVar[str] = "service"

    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        description="Redis or Valkey; redis://, rediss:// or unix://",
    )
    redis_password_file: Path | None = Field(
        default=None, description="file with the password for redis_url; none: as the URL says"
    )
    redis_patience_s: float = Field(
        default=10.0, ge=0, description="how long the start waits for Redis to answer"
    )
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=0, ge=0, le=65535, description="gRPC port; 0 takes a free one")
    advertise_host: str | None = Field(
        default=None,
        description="host that others reach this service by; default: host, or the hostname",
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Prometheus port; 0 takes a free one, none: no endpoint",
    )
    log_level: LogLevel = Field(default="info", description="least severe level that is written")
    log_format: LogFormat = Field(
        default="auto", description="auto: console on a terminal, else JSON"
    )
    stop_grace_s: float = Field(
        default=15.0, ge=0, description="how long this process may take to end after SIGTERM"
    )
    run_dir: Path = Field(
        default_factory=_default_run_dir, description="directory of this deployment on this host"
    )
    secret: SecretStr | None = Field(
        default=None, description="the deployment's secret, the same for all of its services"
    )
    secret_file: Path | None = Field(
        default=None, description="file with the secret; default: run_dir/secret, made when missing"
    )

    @property
    def request_grace_s(self) -> float:
        """How long running requests may go on after SIGTERM; what is left of `stop_grace_s` is for
        telling those that did not end, and for leaving."""
        return max(0.0, self.stop_grace_s - ENDING_S)

    @property
    def num_threads(self) -> int | None:
        """Threads of OpenMP in this process; None leaves OpenMP its own default."""
        return None

    def check(self) -> None:
        """What can be known of these settings on this machine before the service starts
        (`--check`). StartupError."""

    def address(self, port: int) -> str:
        """`host:port` under which others reach this service when it listens on `port`."""
        host = self.advertise_host or self.host
        if host in _WILDCARD_HOSTS:
            host = socket.gethostname()
        return join_host_port(host, port)


class PoolServiceSettings(ServiceSettings):
    """Services that touch the KV pools of their host: workers and the block manager."""

    pool_root: Path = Field(
        default_factory=lambda data: data["run_dir"] / "pools",
        description="directory that holds one directory per pool; a tmpfs. Default: run_dir/pools",
    )


S = TypeVar("S", bound=ServiceSettings)


def load_settings(cls: type[S]) -> S:
    """The service's settings from the environment; StartupError names every wrong variable."""
    prefix = env_prefix(cls)
    problems = [_unknown_variable(name, cls) for name in _unknown_names(os.environ, cls)]
    try:
        settings = cls()
    except ValidationError as error:
        problems += [_problem(prefix, detail["loc"], detail["msg"]) for detail in error.errors()]
    except SettingsError as error:
        problems.append(str(error))
    if problems:
        raise StartupError("bad configuration: " + "; ".join(problems))
    return settings


def env_prefix(cls: type[ServiceSettings]) -> str:
    return cls.model_config.get("env_prefix", "")


def variables(cls: type[ServiceSettings]) -> dict[str, str]:
    """Every variable that the service reads, and what it means."""
    prefix = env_prefix(cls)
    return {
        prefix + name.upper(): field.description or "" for name, field in cls.model_fields.items()
    }


def resolved(settings: ServiceSettings) -> dict[str, str]:
    """Every setting as it came out, by variable; passwords are blanked."""
    prefix = env_prefix(type(settings))
    return {
        prefix + name.upper(): _shown(getattr(settings, name))
        for name in type(settings).model_fields
    }


def join_host_port(host: str, port: int) -> str:
    """`host:port`, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def without_password(url: str) -> str:
    """The URL as it may be shown: `***` for its password, also for one in its query."""
    parts = urlsplit(url)
    query = "&".join(map(_without_value, parts.query.split("&")))
    if parts.password is None and query == parts.query:
        return url
    credentials, at, host = parts.netloc.rpartition("@")
    if parts.password is not None:
        credentials = f"{parts.username or ''}:***"
    return urlunsplit(parts._replace(netloc=credentials + at + host, query=query))


def _without_value(field: str) -> str:
    """Of a query; redis-py takes a password, and one of a TLS key, from there."""
    name, is_, _ = field.partition("=")
    return f"{name}=***" if is_ and "password" in unquote(name).lower() else field


def _shown(value: object) -> str:
    if value is None or value == ():
        return "none"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    if isinstance(value, SecretStr):
        return str(value)
    return without_password(value) if isinstance(value, str) else str(value)


def _unknown_names(environ: Mapping[str, str], cls: type[ServiceSettings]) -> Iterable[str]:
    prefix, known = env_prefix(cls), variables(cls)
    if not prefix:
        return []
    return [n for n in sorted(environ) if n.upper().startswith(prefix) and n.upper() not in known]


def _unknown_variable(name: str, cls: type[ServiceSettings]) -> str:
    guesses = difflib.get_close_matches(name.upper(), variables(cls), n=1)
    return f"{name} is not a setting" + (f" (did you mean {guesses[0]}?)" if guesses else "")


def _problem(prefix: str, location: tuple[int | str, ...], message: str) -> str:
    field, *inner = location or ("",)
    path = "".join(f"[{step}]" for step in inner)
    return f"{prefix}{str(field).upper()}{path}: {message}"
