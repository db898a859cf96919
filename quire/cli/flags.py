"""Flags that several commands share, as dataclasses: a command takes one as a parameter."""

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from functools import wraps
from typing import Annotated, Any, get_type_hints

from typer import Option

from quire.cli.runs import run_address
from quire.client import DEFAULT_ADDRESS, Client
from quire.supervisor import RUNS

Json = Annotated[bool, Option("--json", help="print JSON for scripts")]


@dataclass(frozen=True)
class GatewayFlags:
    """Which gateway to call."""

    address: Annotated[
        str, Option(metavar="HOST:PORT", envvar="QUIRE_ADDRESS", help="the gateway")
    ] = DEFAULT_ADDRESS

    def connect(self) -> Client:
        return Client(self.address)


@dataclass(frozen=True)
class OperationsFlags:
    """Where to call operations."""

    address: Annotated[
        str | None,
        Option(
            metavar="ADDRESS",
            envvar="QUIRE_OPERATIONS_ADDRESS",
            help="where a gateway serves operations: HOST:PORT (--operations-port of `quire "
            "serve`) or unix:PATH; default: the run of this user on this host",
        ),
    ] = None
    run: Annotated[
        str | None,
        Option(
            metavar="PORT|DIR",
            envvar="QUIRE_RUN",
            help="which run of this host: its gRPC port, or its directory; default: the only one",
        ),
    ] = None

    def connect(self) -> Client:
        return Client(self.address or run_address(self.run, RUNS))


@dataclass(frozen=True)
class WaitFlags:
    """Whether to wait for the end of an operation."""

    wait: Annotated[bool, Option("--wait", help="wait until it is done")] = False
    timeout: Annotated[float, Option(metavar="S", min=0, help="limit of --wait")] = 600.0


def with_flags(command: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the command for typer: each parameter whose type is a dataclass is replaced by that
    dataclass's fields."""
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
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]


def _default(field: "Field[Any]") -> Any:
    if field.default_factory is not MISSING:
        return field.default_factory()
    return inspect.Parameter.empty if field.default is MISSING else field.default
