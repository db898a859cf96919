"""Flags and output that several commands share: addresses, JSON, tables, sizes."""

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from quire.cli.runs import run_address
from quire.client import DEFAULT_ADDRESS, Client
from quire.supervisor import RUNS

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Run = Callable[[argparse.Namespace], int]


def add_command(
    commands: Commands, name: str, run: Run, *, help_text: str
) -> argparse.ArgumentParser:
    """Add a command that needs no gateway."""
    command = commands.add_parser(name, help=help_text, description=help_text)
    command.set_defaults(run=run)
    return command


def add_client_command(
    commands: Commands, name: str, run: Run, *, help_text: str
) -> argparse.ArgumentParser:
    """Add a command that calls a gateway."""
    command = add_command(commands, name, run, help_text=help_text)
    command.add_argument(
        "--address",
        metavar="HOST:PORT",
        default=os.environ.get("QUIRE_ADDRESS", DEFAULT_ADDRESS),
        help="the gateway; default: $QUIRE_ADDRESS, else %(default)s",
    )
    command.add_argument("--json", action="store_true", help="print JSON for scripts")
    return command


def add_operations_command(
    commands: Commands, name: str, run: Run, *, help_text: str
) -> argparse.ArgumentParser:
    """Add a command that calls an operation, at the address where a gateway serves operations."""
    command = add_command(commands, name, run, help_text=help_text)
    command.add_argument(
        "--address",
        metavar="ADDRESS",
        default=os.environ.get("QUIRE_OPERATIONS_ADDRESS"),
        help="where a gateway serves operations: HOST:PORT (--operations-port of `quire serve`) or "
        "unix:PATH; default: $QUIRE_OPERATIONS_ADDRESS, else the run of this user on this host",
    )
    command.add_argument(
        "--run",
        dest="run_name",
        metavar="PORT|DIR",
        default=os.environ.get("QUIRE_RUN"),
        help="which run of this host: its gRPC port, or its directory; default: $QUIRE_RUN, else "
        "the only one",
    )
    command.add_argument("--json", action="store_true", help="print JSON for scripts")
    return command


def connect(args: argparse.Namespace) -> Client:
    if not hasattr(args, "run_name"):
        return Client(args.address)
    return Client(args.address or run_address(args.run_name, RUNS))


def print_json(value: "DataclassInstance | Sequence[DataclassInstance]") -> None:
    """Print a value as one line of JSON; the deltas of a request become JSON lines."""
    print(json.dumps(_to_dicts(value), default=_decode_token), flush=True)


def _decode_token(value: bytes) -> str:
    """The text of a token, whose bytes may be part of a character."""
    return value.decode(errors="backslashreplace")


def _to_dicts(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return [dataclasses.asdict(item) for item in value]


T = TypeVar("T")
D = TypeVar("D", bound="DataclassInstance")
Columns = Mapping[str, Callable[[T], object]]
"""Maps each column's header to the function that returns an item's cell."""


def print_items(args: argparse.Namespace, columns: Columns[D], items: Sequence[D]) -> None:
    """Print items as a table, or as JSON with --json."""
    if args.json:
        print_json(items)
    else:
        print_table(columns, items)


def print_table(columns: Columns[T], items: Sequence[T]) -> None:
    """Print a table. Each column is as wide as its widest cell; integers are right-aligned."""
    values = [[cell(item) for cell in columns.values()] for item in items]
    rows = [list(columns), *([_cell(value) for value in row] for row in values)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    is_number = [isinstance(value, int) for value in values[0]] if values else [False] * len(widths)
    for row in rows:
        cells = zip(row, widths, is_number, strict=True)
        print("  ".join(c.rjust(w) if right else c.ljust(w) for c, w, right in cells).rstrip())
    sys.stdout.flush()


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value) or "-"


def size(num_bytes: int) -> str:
    """1536 -> '1.5 KiB'."""
    amount = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024:
            return f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} TiB"


def percent(part: int, whole: int) -> str:
    """`part` of `whole` in percent; empty if `whole` is 0."""
    return f"{part / whole:.0%}" if whole else ""


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def memory_size(text: str) -> str:
    """Checks the format of a size, for a clear message; the worker parses the size."""
    if not re.fullmatch(r"\d+(\.\d+)?\s*([KMGT]i?B?|B)?", text, re.IGNORECASE):
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 512MiB or 2GiB")
    return text
