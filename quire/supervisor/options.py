"""The options of `quire serve`. A field is a flag: its name, its help and the services that get it
are declared once, here or in `quire.options`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from typer import Argument, Option

from quire.options.flag import flags
from quire.options.gateway import GatewayOptions
from quire.options.shared import Options
from quire.options.worker import WorkerOptions
from quire.supervisor.model_source import DEMO

DEFAULT_DRAIN_S = 10.0
DEFAULT_HOST = "127.0.0.1"
DEFAULT_GRPC_PORT = 50051
DEFAULT_HTTP_PORT = 8000

ENDING_S = 5.0
"""The most time that a service takes to end after its running requests
(`services.runtime.config`)."""

MAX_SERVICES = 64
"""The most services of one role. A larger number on one host is a typing error."""

_number = partial(Option, metavar="N", max=MAX_SERVICES)
network = partial(Option, rich_help_panel="Network", show_default=False)
_port = partial(Option, rich_help_panel="Network", metavar="PORT", min=0, max=65535)


@dataclass(frozen=True)
class RunOptions:
    """The options that no service gets under the same name.

    `grpc_port`, `http_port` and `operations_port` are ports of the first gateway; each further
    gateway takes the next ones. `quire.supervisor.models` finds the models and their own options.
    """

    models: Annotated[
        list[str] | None,
        Argument(
            metavar="[[NAME,ALIAS...=]MODEL]...",
            help="the models to serve, each a directory in Hugging Face format, a GGUF file, an id "
            f"of the Hugging Face hub (downloaded if the cache does not have it), or `{DEMO}` "
            "(SmolLM2-135M-Instruct), which is the default",
            show_default=False,
        ),
    ] = None
    model: Annotated[str | None, Option(metavar="DIR|FILE|ID", help="the same, for one model")] = (
        None
    )
    model_name: Annotated[
        str | None,
        Option(
            "--served-model-name",
            metavar="NAME[,ALIAS...]",
            help="the model's names for clients; default: its id, or the name of the directory or "
            "file",
        ),
    ] = None
    offline: Annotated[
        bool, Option("--offline", help="download no model: serve only what this host has")
    ] = False
    own: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="MODEL.OPTION=VALUE",
            help="an option of one of several models, such as big.pool_memory=4GiB or big.decode=2",
            show_default=False,
        ),
    ] = None
    num_prefill: Annotated[
        int | None,
        _number(
            "--prefill",
            min=0,
            help="prefill workers; 0: other hosts have them; default: 1, or 0 with --mix",
        ),
    ] = None
    num_decode: Annotated[
        int, _number("--decode", min=0, help="decode workers; 0: other hosts have them")
    ] = 1
    num_gateways: Annotated[
        int, _number("--gateways", min=1, help="gateways, each on the next ports")
    ] = 1
    host: Annotated[
        str, Option(help="address on which the gateways listen", rich_help_panel="Network")
    ] = DEFAULT_HOST
    grpc_port: Annotated[int, _port(help="gRPC; 0 takes a free one")] = DEFAULT_GRPC_PORT
    http_port: Annotated[int, _port(help="OpenAI HTTP; 0 takes a free one")] = DEFAULT_HTTP_PORT
    operations_port: Annotated[
        int | None,
        _port(
            help="serve operations (drain, scale, audit ...) on this port of 127.0.0.1 too; "
            "default: only on a socket of this user"
        ),
    ] = None
    redis_url: Annotated[
        str | None,
        network(metavar="URL", help="redis://, rediss:// or unix://; default: an embedded Valkey"),
    ] = None
    service_host: Annotated[
        str | None,
        network(
            metavar="ADDRESS",
            help="where workers, block manager and movers listen and are reached, also by other "
            "hosts; default: 127.0.0.1",
        ),
    ] = None
    mover: Annotated[
        bool | None,
        network(
            help="copy KV from the pools of other hosts; default: with --redis-url and "
            "--service-host, unless the pools are on a GPU"
        ),
    ] = None
    secret_file: Annotated[
        Path | None,
        network(
            metavar="FILE",
            help="the deployment's secret, the same on all hosts; default: one of this run",
        ),
    ] = None
    service_tls: Annotated[
        Path | None,
        network(
            metavar="DIR",
            help="certificates of `quire certs` for connections between services; default: no TLS",
        ),
    ] = None
    drain_time: Annotated[
        float,
        Option(
            metavar="S",
            min=0,
            max=3600,
            help="how long running requests may go on after Ctrl-C or `quire down`",
        ),
    ] = DEFAULT_DRAIN_S
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Option(help="the lowest level that the services log"),
    ] = "info"


ServiceFlags = flags("ServiceFlags", WorkerOptions.model_fields | GatewayOptions.model_fields)
"""The options of workers and gateways."""


@dataclass(frozen=True)
class ServeOptions(ServiceFlags, RunOptions):  # type: ignore[misc, valid-type]  # made from `quire.options`
    """The options of one run. None leaves a setting to the services' environment variables and
    defaults."""

    @property
    def stop_grace_s(self) -> float:
        """How long a service may take to end after SIGTERM."""
        return self.drain_time + ENDING_S

    @property
    def has_movers(self) -> bool:
        if self.mover is not None:
            return self.mover
        has_others = self.shares_store and self.service_host is not None
        return has_others and not self.is_on_gpu

    @property
    def shares_store(self) -> bool:
        """Whether other hosts may belong to the deployment."""
        return self.redis_url is not None

    @property
    def is_on_gpu(self) -> bool:
        return self.device not in (None, "cpu")

    def settings(self, services: type[Options]) -> dict[str, str]:
        """The settings that the user has chosen for the services whose options `services` has, by
        name in capitals."""
        chosen = {name: getattr(self, name) for name in services.model_fields}
        return {
            name.upper(): "true" if value is True else str(value)
            for name, value in chosen.items()
            if value is not None and value is not False
        }
