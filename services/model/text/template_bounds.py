"""jinja2's sandbox with bounds: a checkpoint's chat template is a program of a stranger, and
renders in the gateway's threads. What it makes has a largest size, and a rendering has a time.

Sizes are checked before a value exists. A value counts with its characters and `_ITEM` more for
each of its items, also where items are one and the same object: as text each of them is there.
"""

import functools
import re
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_CHARACTERS = 64 << 20
"""The largest value. It is above the largest request, so that a template has room for what it adds
to one."""
MAX_TOTAL = 4 * MAX_CHARACTERS
"""The sum of all values that a rendering makes, which it could keep alive together."""
MAX_SECONDS = 10.0

_ITEM = 16
_LARGEST_INTEGER_BITS = 1 << 16
_WIDTH = re.compile(r"\d{8,}")
_TEXT_MAKERS = (
    *("join", "format", "tojson", "string", "sum", "center", "indent"),
    *("ljust", "rjust", "zfill", "expandtabs"),
)
"""Filters and methods whose results have the text, or the items, of all that they are given."""

_ITEM_MAKERS = ("list", "split", "rsplit", "splitlines", "sort", "unique", "reverse")
"""Filters and methods that make items of a text."""
_LEFT_OUT = ("lipsum", "pprint", "urlize", "wordwrap", "xmlattr", "batch", "slice", "striptags")
"""Filters and functions for web pages: their sizes are hard to tell, and no chat needs them."""
_END = object()
_UNSAFE = ("encode", "to_bytes", "translate")


@dataclass(slots=True)
class _Work:
    """The work that a rendering may still do."""

    end: float = float("inf")
    left: int = MAX_TOTAL


_WORK: ContextVar[_Work] = ContextVar("work")


@contextmanager
def time_bound(seconds: float = MAX_SECONDS) -> Iterator[None]:
    """Templates that render in the context end after so many seconds, with a TemplateError."""
    token = _WORK.set(_Work(time.monotonic() + seconds))
    try:
        yield
    finally:
        _WORK.reset(token)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Checks the time in each turn of a loop and in each call, and sizes before values exist."""

    intercepted_binops = frozenset(("*", "+", "%", "**"))

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_printed, **options)
        for name in _LEFT_OUT:
            self.filters.pop(name, None)
            self.globals.pop(name, None)
        for name, made in self.filters.items():
            self.filters[name] = bounded(name, made)

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        found, size = [], 0
        for part in parts:
            size += len(part)
            _check_size(size)
            found.append(part)
        text = "".join(found)
        _made(text)
        return text

    def joined(self, *values: Any) -> str:
        return self.concat(map(str, map(_printed, values)))

    def turn(self) -> bool:
        return True

    def made(self, value: Any) -> Any:
        return _made(value)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _UNSAFE and super().is_safe_attribute(obj, attr, value)

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        _check_time()
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps `format`
        if isinstance(text := getattr(method, "__self__", None), str):
            _check_growth(method.__name__.removesuffix("_map"), text, (*args, *kwargs.values()))
        return _made(super().call(context, function, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator, left, right:
            case "*", (str() | list() | tuple()), int():
                _check_size(_size(left) * right)
            case "*", int(), (str() | list() | tuple()):
                _check_size(left * _size(right))
            case "*", int(), int():
                _check_bits(left.bit_length() + right.bit_length())
            case "+", (str() | list() | tuple()), (str() | list() | tuple()):
                _check_size(_size(left) + _size(right))
            case "%", str(), _:
                _check_growth("format", left, right if isinstance(right, tuple) else (right,))
            case "**", int(), int():
                _check_bits(left.bit_length() * right)
        return _made(super().call_binop(context, operator, left, right))

    def bounded_template(self, source: str) -> Template:
        """Add checks to loops and joins of a template. Raises TemplateError for wrong syntax."""
        template = self.parse(source)
        for loop in list(template.find_all(nodes.For)):
            loop.body.insert(0, nodes.ExprStmt(_call("turn", [])))
            if loop.test is not None:
                loop.test = nodes.And(_call("turn", []), loop.test)
        _replace_joins(template)
        return self.from_string(template.set_environment(self))  # type: ignore[arg-type]


def _call(name: str, args: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), args, [], None, None)


def _replace_joins(node: nodes.Node) -> None:
    """Make calls of `joined` of all operators `~`, and give all slices to `made`."""
    for name, value in node.iter_fields():
        values = value if isinstance(value, list) else [value]
        for number, each in enumerate(values):
            if not isinstance(each, nodes.Node):
                continue
            _replace_joins(each)
            if isinstance(each, nodes.Concat):
                values[number] = _call("joined", each.nodes)
            elif isinstance(each, nodes.Getitem) and isinstance(each.arg, nodes.Slice):
                values[number] = _call("made", [each])
        if values is not value and isinstance(value, nodes.Node):
            setattr(node, name, values[0])


def bounded(name: str, made: Any) -> Any:
    """A filter with checks. Some filters get the context before the value."""
    place = 1 if hasattr(made, "jinja_pass_arg") else 0

    @functools.wraps(made)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_time()
        *before, value = args[: place + 1]
        if name in _TEXT_MAKERS and isinstance(value, Iterator):
            value = list(value)
        _check_growth(name, value, (*args[place + 1 :], *kwargs.values()))
        return _made(made(*before, value, *args[place + 1 :], **kwargs))

    return checked


def _check_growth(name: str, value: Any, args: tuple[Any, ...]) -> None:
    """Refuse a method or filter whose result would be too large, or an integer of many digits."""
    text = value if isinstance(value, str) else ""
    strings = [arg for arg in args if isinstance(arg, str)]
    if name in ("int", "round"):
        _check_bits(max([4 * len(text), *(4 * arg for arg in args if isinstance(arg, int))]))
    elif name in ("e", "escape", "forceescape"):
        _check_size(6 * len(text))
    elif name in _ITEM_MAKERS:
        _check_size(_ITEM * (text.count(strings[0]) if strings and strings[0] else len(text)))
    elif name == "replace" and len(strings) > 1:
        _check_size(len(text) + text.count(strings[0]) * len(strings[1]))
    elif name in _TEXT_MAKERS:
        size, largest = _weight([value, *args])
        match name:
            case "join":
                times, width = size // _ITEM, max(map(len, [text, *strings]))
            case "format":
                times, width = text.count("{") + text.count("%"), size + largest
                width += MAX_CHARACTERS if _WIDTH.search(text) else 0
            case "indent" | "expandtabs":
                times, width = text.count("\n") + text.count("\t") + 1, largest + size - len(text)
            case "tojson":
                times, width = size // _ITEM, largest if args else 0
            case _:
                times, width = 1, largest
        _check_size(size + times * width)


def _printed(value: Any) -> Any:
    """A value that becomes text."""
    if not isinstance(value, str | int | float | None):
        _weight([value])
    return value


def _weight(values: list[Any]) -> tuple[int, int]:
    """The size of values with all that is in them, and the largest integer there. Raises
    TemplateError if the values are too large."""
    size, largest = 0, 0
    left = [iter(values)]
    while left:
        each = next(left[-1], _END)
        if each is _END:
            left.pop()
            continue
        size += _ITEM
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, int):
            largest = max(largest, each)
        elif isinstance(each, Namespace):
            raise TemplateError("makes a text of a namespace")
        elif isinstance(each, Mapping):
            left += [iter(each), iter(each.values())]
        elif isinstance(each, Collection):
            left.append(iter(each))
        _check_size(size)
    return size, largest


def _size(value: Any) -> int:
    """The size of a value without what is in its items."""
    return len(value) if isinstance(value, str) else _ITEM * len(value)


def _made(value: Any) -> Any:
    """Count a value that was made, unless it is no text and has no items."""
    if isinstance(value, str | list | tuple):
        work = _WORK.get(None)
        if work is not None:
            work.left -= _size(value)
            if work.left < 0:
                raise TemplateError(f"makes more than {MAX_TOTAL:,} characters in all")
    return value


def _check_bits(bits: int) -> None:
    if bits > _LARGEST_INTEGER_BITS:
        raise TemplateError(f"makes an integer of more than {_LARGEST_INTEGER_BITS:,} bits")


def _check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise TemplateError(f"makes more than {MAX_CHARACTERS:,} characters")


def _check_time() -> None:
    work = _WORK.get(None)
    if work is not None and time.monotonic() > work.end:
        raise TemplateError(f"takes more than {MAX_SECONDS:g} s")
