"""Lists the services of a run, with the settings of each.

A service takes its settings from its environment only. The user's variables (such as
QUIRE_DECODE_LOG_LEVEL) reach the service too; flags of `quire serve` override them. A port that the
user has set for a role (QUIRE_DECODE_METRICS_PORT) is the port of the role's first worker; the
second worker takes the next port, and so on.
"""

import itertools
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from quire.module_command import service_command
from quire.options.gateway import GatewayOptions
from quire.supervisor import valkey
from quire.supervisor.child import ChildSpec, Stage
from quire.supervisor.models import ROLES, ModelOptions, aliases
from quire.supervisor.options import ServeOptions
from quire.supervisor.run_directory import metrics_directory, supervisor_address

LOOPBACK = "127.0.0.1"


def services(
    options: ServeOptions, models: Sequence[ModelOptions], run: Path, *, log_format: str = "json"
) -> tuple[ChildSpec, ...]:
    """All services but the store, in the order in which they start."""
    common = _common(options, run, log_format)
    gateway = {
        **common,
        "SUPERVISOR": supervisor_address(run),
        "MODELS": ",".join(model.name for model in models),
    }
    if names := aliases(models):
        gateway["MODEL_ALIASES"] = names
    return (
        _service("block_manager", "block-manager", Stage.BLOCK_MANAGER, common),
        *_workers(worker_groups(options, models, run, log_format=log_format), models),
        *(_movers(models, common) if options.has_movers else ()),
        *(_gateway(options, index, gateway) for index in range(options.num_gateways)),
    )


def worker_groups(
    options: ServeOptions, models: Sequence[ModelOptions], run: Path, *, log_format: str = "json"
) -> tuple[ChildSpec, ...]:
    """Return a spec for each role and model, from which `ChildSpec.worker` makes its workers'."""
    num_workers = sum(model.num_prefill + model.num_decode for model in models)
    common = {**_common(options, run, log_format), "NUM_EXPECTED_WORKERS": str(num_workers)}
    return tuple(
        replace(
            _service(role, role, Stage.WORKER, {**common, **model.worker_settings()}),
            role=role,
            model=model.name,
        )
        for role in ROLES
        for model in models
    )


def store(options: ServeOptions, run: Path) -> ChildSpec | None:
    """The embedded Valkey, unless the run uses another server."""
    if options.redis_url is not None:
        return None
    return ChildSpec("redis", valkey.command(run), Stage.STORE, noise=valkey.NOISE)


def _common(options: ServeOptions, run: Path, log_format: str) -> dict[str, str]:
    """The settings of every service."""
    settings = {
        "REDIS_URL": options.redis_url or valkey.redis_url(run),
        "RUN_DIR": str(run),
        "LOG_LEVEL": options.log_level,
        "LOG_FORMAT": log_format,
        "HOST": options.service_host or LOOPBACK,
        "STOP_GRACE_S": str(options.stop_grace_s),
    }
    if options.secret_file:
        settings["SECRET_FILE"] = str(options.secret_file)
    if tls := options.service_tls:
        settings |= {
            "TLS_CERT": str(tls / "service.crt"),
            "TLS_KEY": str(tls / "service.key"),
            "TLS_CA": str(tls / "ca.crt"),
        }
    return settings


def _workers(groups: Sequence[ChildSpec], models: Sequence[ModelOptions]) -> Iterator[ChildSpec]:
    """Return the workers with which the run begins; workers of one role have different numbers."""
    by_name = {model.name: model for model in models}
    numbers: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
    for group in groups:
        for _ in range(by_name[group.model].number(group.role)):
            number = next(numbers[group.role])
            yield group.worker(number + 1, number)


def _movers(models: Sequence[ModelOptions], common: dict[str, str]) -> Iterator[ChildSpec]:
    """Return the movers, one for each pool."""
    for number, model in enumerate(models):
        settings = {**common, "MODEL_NAME": model.name}
        name = f"mover-{number + 1}" if len(models) > 1 else "mover"
        yield _service("mover", name, Stage.WORKER, settings, number)


def _gateway(options: ServeOptions, index: int, common: dict[str, str]) -> ChildSpec:
    settings = {
        **common,
        **options.settings(GatewayOptions),
        "HOST": options.host,
        "PORT": str(options.grpc_port + index),
        "HTTP_PORT": str(options.http_port + index),
    }
    if options.operations_port is not None:
        settings["OPERATIONS_PORT"] = str(options.operations_port + index)
    name = f"gateway-{index + 1}" if index else "gateway"
    http = "QUIRE_GATEWAY_HTTP_FD", options.host, options.http_port + index
    return replace(_service("gateway", name, Stage.GATEWAY, settings, index), http=http)


def _service(
    module: str, name: str, stage: Stage, settings: dict[str, str], number: int = 0
) -> ChildSpec:
    prefix = f"QUIRE_{module.upper()}_"
    environment = {prefix + setting: value for setting, value in settings.items()}
    sockets = metrics_directory(Path(settings["RUN_DIR"])) / module.replace("_", "-")
    reads_all = module == "gateway" and number == 0
    return ChildSpec(
        name=name,
        command=tuple(service_command(module)),
        stage=stage,
        environment=environment,
        base_ports=_base_ports(prefix, environment),
        metrics_socket=None if reads_all else (prefix + "METRICS_SOCKET", str(sockets)),
        number=number,
    )


def _base_ports(prefix: str, environment: Mapping[str, str]) -> dict[str, int]:
    """Ports that the user has set for a role. 0 is left out: with 0 each service takes a free
    port."""
    asked = {prefix + name: os.environ.get(prefix + name, "") for name in ("PORT", "METRICS_PORT")}
    return {
        name: int(port)
        for name, port in asked.items()
        if name not in environment and port.isdecimal() and int(port)
    }
