"""Settings of a service: one frozen class, read only from the environment, once at start.

A variable's name is the service's prefix and the field's name (`QUIRE_GATEWAY_PORT`). A variable
that has the prefix but names no field is an error: otherwise a misspelt setting would silently have
its default.
"""

import difflib
import os
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict, SettingsError

from blockstore.redaction import without_password
from quire.options.flag import plain
from quire.sockets import join_host_port
from services.runtime.errors import StartupError

ENDING_S = 5.0
"""The part of `stop_grace_s` that a service keeps for its shutdown after its running requests."""

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "console", "json", "supervised"]
"""`supervised` is `console` without the time, which the supervisor of `quire serve` adds."""


_WILDCARD_HOSTS = frozenset({"", "0.0.0.0", "::"})


class ServiceSettings(BaseSettings):
    """The settings that every service has. A subclass sets its role, and its prefix in
    `model_config`:

    class GatewaySettings(ServiceSettings):
        model_config = SettingsConfigDict(env_prefix="QUIRE_GATEWAY_")
        service: ClassVar[str] = "gateway"
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        validate_default=True,
        env_parse_none_str="none",
        enable_decoding=False,
    )

    service: ClassVar[str] = "service"

    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        description="Redis >= 7 or Valkey: redis://, rediss:// or unix://, also [several hosts, a "
        "cluster or a Sentinel](failures.md#redis-cluster-and-failover)",
    )
    redis_password_file: Path | None = Field(
        default=None,
        description="file with the password of the user in redis_url (redis://quire@host:6379); "
        "none: the password is in the URL, or there is none",
    )
    redis_patience_s: float = Field(
        default=10.0, ge=0, description="how long the start waits for an answer of Redis"
    )
    host: str = Field(
        default="127.0.0.1", description="address to listen on; :: takes IPv4 and IPv6"
    )
    port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="gRPC port, of the first of several workers; 0 takes a free one",
    )
    advertise_host: str | None = Field(
        default=None,
        description="host by which other services reach this one; none: host, or the hostname if "
        "host is 0.0.0.0",
    )
    metrics_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="Prometheus port, of the first of several workers; 0: a free one, none: none",
    )
    metrics_socket: Path | None = Field(
        default=None,
        description="without metrics_port: Unix socket on which a gateway reads the metrics",
    )
    log_level: LogLevel = Field(default="info", description="the lowest level that is logged")
    log_format: LogFormat = Field(
        default="auto",
        description="console (a line for people) or json (every key); auto: console on a terminal; "
        "supervised: as console, without the time, as `quire serve` sets it at a terminal",
    )
    stop_grace_s: float = Field(
        default=15.0,
        ge=0,
        description="how long the process may take to end after SIGTERM: running requests may "
        "finish or move until 5 s before the limit; --drain-time of `quire serve` sets it",
    )
    run_dir: Path = Field(
        default_factory=lambda: Path(f"/dev/shm/quire-{os.getuid()}/default"),
        description="the deployment's directory on this host; default: /dev/shm/quire-UID/default",
    )
    secret: SecretStr | None = Field(
        default=None,
        description="[the deployment's secret](access.md#who-may-do-what), at least 16 bytes, the "
        "same for all of its services",
    )
    secret_file: Path | None = Field(
        default=None,
        description="file with the secret, of the service's user and of mode 0600; without secret "
        "and secret_file: run_dir/secret, made when missing",
    )

    tls_cert: Path | None = Field(
        default=None,
        description="certificate for [connections between services](../security.md#tls); none: "
        "no TLS",
    )
    tls_key: Path | None = Field(default=None, description="its key")
    tls_ca: Path | None = Field(
        default=None, description="the deployment's CA, which signs all services' certificates"
    )

    @property
    def request_grace_s(self) -> float:
        """How long running requests may continue after SIGTERM. In the rest of `stop_grace_s` the
        service sends back the requests that have not ended, and leaves."""
        return max(0.0, self.stop_grace_s - ENDING_S)

    @property
    def num_threads(self) -> int | None:
        """Threads of OpenMP in this process; None for OpenMP's default."""
        return None

    def check(self) -> None:
        """Raises StartupError if a service with these settings cannot start on this machine, as far
        as that can be checked beforehand (`--check`)."""

    def address(self, port: int) -> str:
        """The `host:port` at which other services reach this service if it listens on `port`."""
        host = self.advertise_host or self.host
        if host in _WILDCARD_HOSTS:
            host = socket.gethostname()
        return join_host_port(host, port)


class PoolServiceSettings(ServiceSettings):
    """Settings of services that open the KV pools of their host: workers and the block manager."""

    pool_root: Path = Field(
        default_factory=lambda data: data["run_dir"] / "pools",
        description="directory that holds one directory per pool; a tmpfs. Default: run_dir/pools",
    )


S = TypeVar("S", bound=ServiceSettings)


def load_settings(cls: type[S]) -> S:
    """Read the service's settings from the environment. Raises StartupError, which names every
    wrong variable."""
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
    """The variables that the service reads, with what they mean."""
    prefix = env_prefix(cls)
    return {
        prefix + name.upper(): plain(field.description or "")
        for name, field in cls.model_fields.items()
    }


def resolved(settings: ServiceSettings) -> dict[str, str]:
    """The resolved value of each setting, by variable, without passwords."""
    prefix = env_prefix(type(settings))
    return {
        prefix + name.upper(): _format_value(getattr(settings, name))
        for name in type(settings).model_fields
    }


def chosen(settings: ServiceSettings) -> dict[str, object]:
    """The settings that differ from their defaults, without passwords."""
    return {
        name: value if isinstance(value, bool | int | float) else _format_value(value)
        for name, field in type(settings).model_fields.items()
        if (value := getattr(settings, name)) != field.default and name in settings.model_fields_set
    }


def _format_value(value: object) -> str:
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
    return f"{prefix}{str(field).upper()}{path}: {message.removeprefix('Value error, ')}"
