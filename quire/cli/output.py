"""The output of commands: tables for readers, JSON for scripts."""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
D = TypeVar("D", bound="DataclassInstance")
Columns = Mapping[str, Callable[[T], object]]
"""Maps each column's header to the function that returns an item's cell."""


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


def print_items(as_json: bool, columns: Columns[D], items: Sequence[D]) -> None:
    if as_json:
        print_json(items)
    else:
        print_table(columns, items)


def print_table(columns: Columns[T], items: Sequence[T]) -> None:
    """Print a table; numbers are right-aligned. A table that goes to no terminal is as wide as its
    cells, whatever the width of the screen."""
    # Imported here, so that commands without tables start without it.
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = [[cell(item) for cell in columns.values()] for item in items]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for index, header in enumerate(columns):
        is_number = bool(rows) and isinstance(rows[0][index], int)
        table.add_column(header, justify="right" if is_number else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(table)
        return
    console.width = console.measure(table, options=console.options.update(width=10_000)).maximum
    with console.capture() as shown:
        console.print(table)
    for line in shown.get().splitlines():
        print(line.rstrip())
    sys.stdout.flush()


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value) or "-"


def percent(part: int, whole: int) -> str:
    """`part` of `whole` in percent; empty if `whole` is 0."""
    return f"{part / whole:.0%}" if whole else ""
