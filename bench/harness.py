"""Options of a command, measurements in turn, and tables, for all benchmarks."""

import argparse
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")


def options(kind: type[T], doc: str | None) -> T:
    """Reads the command line into a dataclass, of which each field is a flag. A tuple takes any
    number of values, a field without a default is required, and `doc` is the text of `--help`."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    hints = get_type_hints(kind)
    for each in fields(kind):  # type: ignore[arg-type]
        add_option(parser, each, hints[each.name], each.default)
    given = vars(parser.parse_args()).items()
    return kind(**{name: tuple(v) if isinstance(v, list) else v for name, v in given})


def first(default: Any = MISSING) -> Any:
    """A field that is no flag, but stands first on the command line."""
    return field(default=default, metadata={"first": True})


def one_of(choices: Iterable[str], default: Any = MISSING, *, first: bool = False) -> Any:
    """A field with one of some texts, or a tuple of them. With `first` it is no flag, but stands
    first on the command line."""
    return field(default=default, metadata={"choices": list(choices), "first": first})


def add_option(parser: argparse.ArgumentParser, of: Field[Any], hint: Any, default: Any) -> None:
    """Adds the option of a field, whose type is `hint`."""
    keywords: dict[str, Any] = {}
    if get_origin(hint) is UnionType:  # with None
        hint = get_args(hint)[0]
    if is_tuple := get_origin(hint) is tuple:
        keywords["nargs"] = "*"
        hint = get_args(hint)[0]
    if get_origin(hint) is Literal:
        keywords["choices"], hint = get_args(hint), str
    if choices := of.metadata.get("choices"):
        keywords["choices"] = choices
    if hint is bool:
        keywords["action"] = argparse.BooleanOptionalAction
    else:
        keywords["type"] = hint
    if default is not MISSING:
        keywords["default"] = default
    if of.metadata.get("first"):
        if not is_tuple and default is not MISSING:
            keywords["nargs"] = "?"
        parser.add_argument(of.name, **keywords)
        return
    flag = "--" + of.name.replace("_", "-")
    parser.add_argument(flag, required=default is MISSING, **keywords)


def in_turn(calls: Mapping[str, Callable[[int], T]], rounds: int) -> dict[str, list[T]]:
    """Makes every call, with the number of the round, once a round. Rounds begin with another call
    in turn, so that other load on the machine affects all alike. Returns the results by name."""
    found: dict[str, list[T]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in rotated(list(calls), number):
            found[name].append(calls[name](number))
    return found


def rotated(items: Sequence[T], number: int) -> list[T]:
    """The items, beginning with the one at `number` modulo their count."""
    begin = number % len(items)
    return [*items[begin:], *items[:begin]]


def shown(value: float) -> str:
    """Three significant digits, and all of a whole number."""
    if math.isnan(value):
        return "-"
    if value == int(value) or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:#.3g}".removesuffix(".")


def spread(values: Sequence[float]) -> str:
    """The median, and of several values the lowest and the highest; `-` without any."""
    if not values:
        return "-"
    median = shown(statistics.median(values))
    if len(values) == 1:
        return median
    return f"{median} ({shown(min(values))} to {shown(max(values))})"


def table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table_head(header: Sequence[str], num_texts: int = 1) -> str:
    """The first `num_texts` columns are text, the others are figures."""
    rule = ["---" if number < num_texts else "---:" for number in range(len(header))]
    return f"{table_row(header)}\n{table_row(rule)}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A whole table, whose first column is text."""
    return "\n".join([table_head(header), *map(table_row, rows)])
