"""Settings of the gateway, from QUIRE_GATEWAY_* variables."""

from pathlib import Path
from typing import ClassVar

from pydantic import Field, SecretStr
from pydantic_settings import SettingsConfigDict

from services.common.config import ServiceSettings


class GatewaySettings(ServiceSettings):
    model_config = SettingsConfigDict(env_prefix="QUIRE_GATEWAY_")
    service: ClassVar[str] = "gateway"

    http_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="OpenAI-compatible HTTP; 0 takes a free port, none: no HTTP",
    )
    secret: SecretStr | None = Field(
        default=None, description="the deployment's secret, which roots all prefix hashes"
    )
    secret_file: Path | None = Field(
        default=None, description="file with the secret; default: run_dir/secret, made when missing"
    )
    supervisor: str | None = Field(
        default=None, description="gRPC address of who scales the workers; none: nobody does"
    )
    max_waiting: int = Field(
        default=1024, ge=1, description="requests in the queue; more are refused"
    )
    report_cached_tokens: bool = Field(
        default=False,
        description="usage tells every client its cached tokens, not only one with a cache_salt",
    )
    patience_s: float = Field(
        default=5.0, ge=0, description="how long a request waits while no worker can take any"
    )
    store_patience_s: float = Field(
        default=30.0, gt=0, description="how long a new request waits while Redis is away"
    )
    reserve_timeout_s: float = Field(
        default=2.0, gt=0, description="how long a decode worker may take to answer a reservation"
    )
    poll_s: float = Field(
        default=0.5, gt=0, description="how often the registry is read for workers"
    )
    rebalance_s: float = Field(
        default=1.0, ge=0, description="how often decode workers' loads are compared; 0: never"
    )
    silence_s: float = Field(
        default=2.0, gt=0, description="how long a worker may say nothing before it is given up"
    )
    read_window_s: float = Field(
        default=10.0,
        ge=0,
        description="how long a request pauses for a client that does not read it",
    )
