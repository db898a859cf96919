"""Flags that several commands share, as dataclasses: a command takes one as a parameter."""

import inspect
import time
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from typer import Option

from quire.addresses import DEFAULT_ADDRESS
from quire.errors import DeadlineExceeded
from quire.sampling import Number

if TYPE_CHECKING:
    from quire.client import Client
    from quire.connections import Tls

_POLL_S = 0.2

RunName = Annotated[
    str | None,
    Option(
        metavar="PORT|DIR",
        envvar="QUIRE_RUN",
        help="which run of this host: its gRPC port, or its directory; default: the only one",
    ),
]
Json = Annotated[bool, Option("--json", help="print JSON for scripts")]


@dataclass(frozen=True)
class AccessFlags:
    """The API key and the TLS files with which to call a gateway."""

    api_key: Annotated[
        str | None,
        Option(
            metavar="KEY",
            envvar="QUIRE_API_KEY",
            show_envvar=True,
            help="rather set the variable: other users of this host see the flag",
        ),
    ] = None
    tls: Annotated[
        bool, Option("--tls", envvar="QUIRE_TLS", help="use TLS, and trust well-known CAs")
    ] = False
    tls_ca: Annotated[
        Path | None,
        Option(metavar="FILE", envvar="QUIRE_TLS_CA", help="use TLS, and trust this CA"),
    ] = None
    tls_cert: Annotated[
        Path | None,
        Option(metavar="FILE", envvar="QUIRE_TLS_CERT", help="certificate to show to gateways"),
    ] = None
    tls_key: Annotated[
        Path | None, Option(metavar="FILE", envvar="QUIRE_TLS_KEY", help="its key")
    ] = None

    @property
    def tls_files(self) -> "Tls | None":
        """Return the TLS files, or None without TLS."""
        from quire.connections import Tls

        uses_tls = self.tls or self.tls_ca is not None or self.tls_cert is not None
        return Tls(self.tls_ca, self.tls_cert, self.tls_key) if uses_tls else None

    def client(self, address: str) -> "Client":
        # Imported here and not above, because the help of a command needs no gRPC.
        from quire.client import Client

        return Client(address, api_key=self.api_key, tls=self.tls_files)


@dataclass(frozen=True)
class GatewayFlags(AccessFlags):
    """The gateway to call."""

    address: Annotated[
        str, Option(metavar="HOST:PORT", envvar="QUIRE_ADDRESS", help="the gateway")
    ] = DEFAULT_ADDRESS

    def connect(self) -> "Client":
        return self.client(self.address)


@dataclass(frozen=True)
class OperationsFlags(AccessFlags):
    """The address of operations."""

    address: Annotated[
        str | None,
        Option(
            metavar="ADDRESS",
            envvar="QUIRE_OPERATIONS_ADDRESS",
            help="where a gateway serves operations: HOST:PORT (a gateway with API keys, for an "
            "operator's key, or --operations-port of `quire serve`), or unix:PATH; default: the "
            "run of this user on this host",
        ),
    ] = None
    run: RunName = None

    @property
    def addresses(self) -> str:
        """The addresses of one or more gateways of a deployment, separated by commas."""
        from quire.cli.runs import run_address
        from quire.supervisor.run_directory import RUNS

        return self.address or run_address(self.run, RUNS)

    def connect(self) -> "Client":
        return self.client(self.addresses)


@dataclass(frozen=True)
class WaitFlags:
    """Whether to wait for the end of an operation."""

    wait: Annotated[bool, Option("--wait", help="wait until it is done")] = False
    timeout: Annotated[float, Option(metavar="S", min=0, help="limit of --wait")] = 600.0

    def until_done(self, missing: Callable[[], str]) -> None:
        """Wait until `missing` returns nothing: it says what is not done yet. Raises
        DeadlineExceeded after `timeout`."""
        give_up_at = time.monotonic() + self.timeout
        while text := missing():
            if time.monotonic() > give_up_at:
                raise DeadlineExceeded(f"{text} after {self.timeout:g} s", "timeout")
            time.sleep(_POLL_S)


def with_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return the command for typer, in which the fields of a dataclass take the place of a
    parameter of that type."""
    parameters = inspect.signature(command, eval_str=True).parameters.values()
    groups: dict[str, type[Any]] = {
        each.name: each.annotation
        for each in parameters
        if isinstance(each.annotation, type) and is_dataclass(each.annotation)
    }

    @wraps(command)
    def run(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return command(**values)

    expanded = [
        flag
        for each in parameters
        for flag in (_flags(groups[each.name]) if each.name in groups else [each])
    ]
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [flag.replace(kind=inspect.Parameter.KEYWORD_ONLY) for flag in expanded]
    )
    run.__annotations__ = {flag.name: flag.annotation for flag in expanded}
    return run


def _flags(group: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=_default(field),
            annotation=_annotation(hints[field.name]),
        )
        for field in fields(group)
    ]


def _annotation(hint: Any) -> Any:
    """The type of a flag with its option, made here for a sampling parameter that is a number."""
    number = next(iter(getattr(hint, "__metadata__", ())), None)
    if isinstance(number, Number):
        return Annotated[type(number.neutral) | None, Option(help=number.remark)]
    return hint


def _default(field: "Field[Any]") -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is MISSING else field.default
