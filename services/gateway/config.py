"""Settings of the gateway, from QUIRE_GATEWAY_* variables."""

from pathlib import Path
from typing import ClassVar

from prometheus_client import CollectorRegistry
from pydantic import ConfigDict, Field
from pydantic_settings import SettingsConfigDict

from quire.options.gateway import GatewayOptions
from quire.options.shared import SeveralTexts
from quire.supervisor.run_directory import metrics_directory
from services.gateway.access.keyring import Keyring
from services.gateway.access.local_only import DashboardSetting
from services.gateway.workers.models.generation_config import GenerationConfig
from services.gateway.workers.models.model_names import parse_aliases
from services.model.checkpoint.adapter import CONFIG_FILE
from services.runtime.config import ServiceSettings, env_prefix
from services.runtime.errors import StartupError
from services.runtime.metrics import KeyringMetrics
from services.runtime.rpc.tls import TlsFiles, given_files, service_tls
from services.runtime.tracing.opening import check_tracing


class UserOptions(GatewayOptions):
    """The settings that the gateway's parts need, also where no service runs them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: SeveralTexts = Field(
        default=(),
        description="the deployment's models, by commas: a request for one of them that has no "
        "workers waits patience_s and then fails with 503; for any other model it fails with 404",
    )
    model_aliases: SeveralTexts = Field(
        default=(), description="more names of models, by commas: ALIAS=MODEL"
    )
    max_waiting: int = Field(
        default=1024,
        ge=1,
        description="requests that may wait; more are refused with RESOURCE_EXHAUSTED. A client "
        "holds at most a quarter of them while other clients wait, and three quarters while it is "
        "alone",
    )
    patience_s: float = Field(
        default=5.0, ge=0, description="how long a request waits while no worker can take any"
    )
    target_ttft_s: float = Field(
        default=1.0,
        gt=0,
        description="time to first token for which quire:recommended_workers plans",
    )
    target_inter_token_s: float = Field(
        default=0.1, gt=0, description="inter-token latency for which it plans"
    )


class PartOptions(UserOptions):
    """The users' settings, and durations that are the same in every deployment: they follow from
    each other and from how often workers report, and a wrong one ends what is healthy. Tests
    shorten them."""

    start_patience_s: float = 600.0
    """How long a request waits while the workers that it lacks load their model. OpenAI's
    clients wait as long for an answer."""
    reserve_timeout_s: float = 0.5
    """How long a decode worker may take to answer a reservation, for which the head of the queue
    waits. An answer takes milliseconds; a worker in a long step misses it and is asked later."""
    poll_s: float = 1.0
    """How often the registry is read for workers, as often as workers renew their entries; twice as
    often while no worker serves."""
    silence_s: float = 2.0
    """How long a worker may say nothing before it is given up. An idle worker reports every 1 to
    1.25 s."""
    rebalance_s: float = 1.0
    """How often decode workers' loads are compared, as often as workers report; 0: never."""


class GatewaySettings(ServiceSettings, UserOptions):
    model_config = SettingsConfigDict(env_prefix="QUIRE_GATEWAY_")
    service: ClassVar[str] = "gateway"

    http_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="OpenAI-compatible HTTP; 0 takes a free port, none: no HTTP",
    )
    http_fd: int | None = Field(
        default=None,
        ge=0,
        description="file descriptor of a socket that listens at http_port already; `quire serve` "
        "sets it, so that another gateway process can take this one's place (`quire upgrade`): the "
        "gRPC port may then be shared, too",
    )
    dashboard: DashboardSetting = Field(
        default="auto",
        description="the [dashboard](observing.md#dashboard) at / of http_port: auto shows it to "
        "operators' keys or, without API keys, to users of this host, if host is a loopback "
        "address; on: to everybody who reaches the port; off: to nobody",
    )
    operations_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="gRPC port for operations, on 127.0.0.1; 0 takes a free one, none: just "
        "run_dir's socket",
    )
    supervisor: str | None = Field(
        default=None,
        description="gRPC address of the supervisor that scales the workers; none: no supervisor",
    )

    @property
    def metrics_directory(self) -> Path | None:
        """The directory of other services' sockets of metrics, which /metrics has too; None if
        another gateway reads this one's socket."""
        return None if self.metrics_socket else metrics_directory(self.run_dir)

    def check(self) -> None:
        """Raises StartupError if a file that the settings name cannot be used, or if default
        sampling parameters or names of models are wrong."""
        check_tracing(self, self.otlp_endpoint)
        parse_aliases(self.model_aliases)
        GenerationConfig.read(self.generation_config, self.override_generation_config)
        for name, directory in self.lora:  # gateways load them when workers have loaded the model
            if not (Path(directory).expanduser() / CONFIG_FILE).is_file():
                raise StartupError(f"--lora {name}={directory}: there is no {CONFIG_FILE}")
        self.keyring(CollectorRegistry())
        for files in (service_tls(self), self.public_tls()):
            if files is not None:
                files.check()

    @property
    def options(self) -> PartOptions:
        """The settings of the gateway's parts."""
        return PartOptions(**{name: getattr(self, name) for name in UserOptions.model_fields})

    def public_tls(self) -> TlsFiles | None:
        """The files for connections of clients. Raises StartupError."""
        names = ("public_tls_cert", "public_tls_key", "public_client_ca")
        files: dict[str, Path | None] = {name: getattr(self, name) for name in names}
        return given_files(env_prefix(type(self)), files, "public_client_ca", needs_ca=False)

    def keyring(self, metrics: CollectorRegistry) -> Keyring | None:
        """The API keys; None if API keys are off. Raises StartupError if the keys cannot be
        used."""
        file = self.api_keys_file
        return None if file is None else Keyring(file, KeyringMetrics(metrics))
