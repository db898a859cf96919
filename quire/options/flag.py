"""How an option looks on the command line of `quire serve`."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, make_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Le
from pydantic.fields import FieldInfo

_PLAIN_TYPES = (bool, int, float, str)


@dataclass(frozen=True, slots=True)
class Flag:
    """The metadata of an option's field that makes it a flag of the command line."""

    metavar: str | None = None
    name: str | None = None
    """The flag, if its name is not the option's."""
    panel: Literal["Engine", "Network"] = "Engine"
    parser: Callable[[str], Any] | None = None
    """Checks the text, and returns the value. Raises ValueError."""


def flag_of(field: FieldInfo) -> Flag:
    return next((each for each in field.metadata if isinstance(each, Flag)), Flag())


def flag_name(name: str, field: FieldInfo) -> str:
    return flag_of(field).name or "--" + name.replace("_", "-")


def annotation(name: str, field: FieldInfo) -> Any:
    """The type of the flag's value for typer; None means that the user has not chosen it."""
    from typer import Option  # only the command line needs it; services read these options too

    flag, kind = flag_of(field), _value_type(field.annotation)
    bounds = {
        word: getattr(each, name)
        for each in field.metadata
        for limit, name, word in ((Ge, "ge", "min"), (Le, "le", "max"))
        if isinstance(each, limit) and flag.parser is None
    }
    option = Option(
        flag_name(name, field),
        metavar=flag.metavar,
        parser=flag.parser,
        rich_help_panel=flag.panel,
        show_default=False,
        help=_help(field),
        **bounds,
    )
    return Annotated[kind if kind is bool else kind | None, option]


def flags(name: str, fields: Mapping[str, FieldInfo]) -> Any:
    """A dataclass of this name that has the options as flags, for a command (`quire.cli.flags`)."""
    made = [
        (option, annotation(option, field), False if field.annotation is bool else None)
        for option, field in fields.items()
    ]
    return make_dataclass(name, made, frozen=True)


def plain(description: str) -> str:
    """A description without the links that the documentation shows."""
    return re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", description)


def _value_type(kind: Any) -> Any:
    """The type of a value on the command line: text, where the service reads more out of it."""
    kinds = [each for each in get_args(kind) or (kind,) if each is not type(None)]
    if get_origin(kind) is Literal:
        return kind
    if len(kinds) == 1 and (kinds[0] in _PLAIN_TYPES or get_origin(kinds[0]) is Literal):
        return kinds[0]
    return str


def _help(field: FieldInfo) -> str:
    text = plain(field.description or "")
    has_default = field.default is not None and field.default not in ("", (), False)
    return f"{text}; default: {field.default}" if has_default else text
