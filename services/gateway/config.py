"""Settings of the gateway, from QUIRE_GATEWAY_* variables."""

from pathlib import Path
from typing import Annotated, ClassVar

from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from quire.choices import ReasoningParser, ToolCallParser
from services.gateway.access.keyring import Keyring
from services.gateway.access.local_only import DashboardSetting
from services.gateway.models.generation_config import AUTO
from services.gateway.models.model_names import parse_aliases
from services.runtime.config import SeveralTexts, env_prefix, split_by_commas
from services.runtime.metrics import KeyringMetrics
from services.runtime.rpc.tls import TlsFiles, given_files, service_tls
from services.runtime.tracing.opening import TracedSettings, check_tracing


class UserOptions(BaseModel):
    """The settings that the gateway's parts need, also where no service runs them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    models: SeveralTexts = Field(
        default=(),
        description="the deployment's models, by commas: while one has no workers, its requests "
        "wait and then fail as unavailable; those for another model fail as not found",
    )
    model_aliases: SeveralTexts = Field(
        default=(),
        description="more names of models, by commas: ALIAS=MODEL",
    )
    generation_config: str = Field(
        default=AUTO,
        description="default sampling parameters: auto (the model's generation_config.json), vllm "
        "(none), or a directory with a generation_config.json",
    )
    override_generation_config: str | None = Field(
        default=None,
        description='JSON object of default sampling parameters, e.g. {"temperature": 0.5}',
    )
    tool_call_parser: ToolCallParser = Field(
        default="auto",
        description="the format of the models' tool calls; auto: that of their chat templates; "
        "none: they have none",
    )
    reasoning_parser: ReasoningParser = Field(
        default="auto", description="the tags around the models' reasoning; auto and none: as above"
    )
    lora: Annotated[tuple[tuple[str, str], ...], NoDecode] = Field(
        default=(), description="LoRA adapters to serve from the start, name=directory, by commas"
    )
    max_loras: int = Field(
        default=8, ge=0, description="most LoRA adapters that are served at a time"
    )
    max_lora_rank: int = Field(
        default=64, ge=1, le=512, description="largest rank of a LoRA adapter"
    )
    client_priority: bool = Field(
        default=False, description="requests may set a priority; without, one other than 0 fails"
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
    rebalance_s: float = Field(
        default=1.0, ge=0, description="how often decode workers' loads are compared; 0: never"
    )
    target_ttft_s: float = Field(
        default=1.0, gt=0, description="time to first token for which workers are recommended"
    )
    target_inter_token_s: float = Field(
        default=0.1, gt=0, description="inter-token latency for which workers are recommended"
    )

    @field_validator("lora", mode="before")
    @classmethod
    def _adapters(cls, value: object) -> object:
        """ValueError: not name=directory, or a name twice."""
        pairs = split_by_commas(value)
        if not isinstance(pairs, list | tuple) or not all(isinstance(one, str) for one in pairs):
            return pairs
        found = [tuple(part.strip() for part in one.partition("=")[::2]) for one in pairs]
        if not all(name and directory for name, directory in found):
            raise ValueError(f"{value!r} is not name=directory, by commas")
        if len({name for name, _ in found}) < len(found):
            raise ValueError("a name of an adapter twice")
        return tuple(found)


class GatewayOptions(UserOptions):
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
    read_window_s: float = 10.0
    """How long a request pauses for a client that does not read. Its blocks stay held meanwhile."""


class GatewaySettings(TracedSettings, UserOptions):
    model_config = SettingsConfigDict(env_prefix="QUIRE_GATEWAY_")
    service: ClassVar[str] = "gateway"

    http_port: int | None = Field(
        default=None,
        ge=0,
        le=65535,
        description="OpenAI-compatible HTTP; 0 takes a free port, none: no HTTP",
    )
    metrics_directory: Path | None = Field(
        default=None,
        description="directory of other services' sockets of metrics, which /metrics has too",
    )
    allowed_hosts: SeveralTexts = Field(
        default=(),
        description="hosts, by commas, that HTTP requests may be for: a name, an address, or "
        "*.example.com; none: any",
    )
    dashboard: DashboardSetting = Field(
        default="auto",
        description="the page at / of http_port: auto shows it to users of this host, if the "
        "gateway listens only there, on to everybody who reaches the port, off to nobody",
    )
    stream_ping_s: float = Field(
        default=15.0,
        ge=0,
        description="how long an HTTP stream may be silent before it sends a comment, so that "
        "proxies do not cut it; 0: it sends none",
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
    public_tls_cert: Path | None = Field(
        default=None, description="certificate for clients, over gRPC and HTTP; none: no TLS"
    )
    public_tls_key: Path | None = Field(default=None, description="its key")
    public_client_ca: Path | None = Field(
        default=None,
        description="the CA whose certificates clients must have; none: clients need none",
    )
    cors_origins: SeveralTexts = Field(
        default=(),
        description="origins, by commas, whose web pages may call the HTTP API; *: all",
    )
    api_keys_file: Path | None = Field(
        default=None,
        description="file of API keys (`quire keys`), read again when it changes; none: no keys",
    )
    trace_ratio: float = Field(
        default=1.0,
        ge=0,
        le=1,
        description="share of the requests to trace whose client has sent no traceparent; one that "
        "has is traced if it says so",
    )

    @field_validator("allowed_hosts")
    @classmethod
    def _hosts(cls, hosts: tuple[str, ...]) -> tuple[str, ...]:
        for host in hosts:
            if "*" in host.removeprefix("*.") and host != "*":
                raise ValueError(
                    f"{host!r}: * stands only for all, or for a first part, as in *.a.b"
                )
        return hosts

    def check(self) -> None:
        check_tracing(self)
        parse_aliases(self.model_aliases)
        self.keyring(CollectorRegistry())
        for files in (service_tls(self), self.public_tls()):
            if files is not None:
                files.check()

    @property
    def options(self) -> GatewayOptions:
        """The settings of the gateway's parts."""
        return GatewayOptions(**{name: getattr(self, name) for name in UserOptions.model_fields})

    def public_tls(self) -> TlsFiles | None:
        """The files for connections of clients. Raises StartupError."""
        names = ("public_tls_cert", "public_tls_key", "public_client_ca")
        files: dict[str, Path | None] = {name: getattr(self, name) for name in names}
        return given_files(env_prefix(type(self)), files, "public_client_ca", needs_ca=False)

    def keyring(self, metrics: CollectorRegistry) -> Keyring | None:
        """The API keys; None if API keys are off. StartupError: they cannot be used."""
        file = self.api_keys_file
        return None if file is None else Keyring(file, KeyringMetrics(metrics))
