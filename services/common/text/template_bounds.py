"""jinja2's sandbox with bounds: a checkpoint's chat template is a program of a stranger, and
renders in the gateway's threads. Strings have a largest size, and a rendering has a time."""

import functools
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.filters import FILTERS
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 64 << 20
"""Above the largest request, so that a template has room for what it adds to one."""
MAX_SECONDS = 10.0

_ENDS: ContextVar[float] = ContextVar("ends")
_WIDTH = re.compile(r"\d{8,}")


@contextmanager
def time_bound(seconds: float = MAX_SECONDS) -> Iterator[None]:
    """Templates that render in the context end after so many seconds, with a TemplateError."""
    token = _ENDS.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _ENDS.reset(token)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Checks the time in each turn of a loop and in each call, and sizes before strings exist."""

    intercepted_binops = frozenset(("*", "+", "%", "**"))

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in ("center", "indent", "format", "replace"):
            self.filters[name] = _bounded(name, FILTERS[name])

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        found, size = [], 0
        for part in parts:
            size += len(part)
            _check_size(size)
            found.append(part)
        return "".join(found)

    def joined(self, *values: Any) -> str:
        return self.concat(map(str, values))

    def turn(self) -> bool:
        return True

    def call(self, context: Context, function: Any, *args: Any, **kwargs: Any) -> Any:
        _check_time()
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps `format`
        if isinstance(text := getattr(method, "__self__", None), str):
            name = method.__name__.removesuffix("_map")
            maps = [each for arg in args if isinstance(arg, dict) for each in arg.values()]
            _check_growth(name, text, (*args, *kwargs.values(), *maps))
        return super().call(context, function, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        match operator, left, right:
            case "*", (str() | list() | tuple()), int():
                _check_size(len(left) * right)
            case "*", int(), (str() | list() | tuple()):
                _check_size(left * len(right))
            case "+", (str() | list() | tuple()), (str() | list() | tuple()):
                _check_size(len(left) + len(right))
            case "%", str(), _:
                _check_growth("format", left, right if isinstance(right, tuple) else (right,))
            case "**", int(), int():
                _check_size(left.bit_length() * right)
        return super().call_binop(context, operator, left, right)

    def bounded_template(self, source: str) -> Template:
        """The template with checks in its loops and joins. TemplateError: its syntax is wrong."""
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
    """Make calls of `joined` of all operators `~`."""
    for name, value in node.iter_fields():
        values = value if isinstance(value, list) else [value]
        for number, each in enumerate(values):
            if not isinstance(each, nodes.Node):
                continue
            _replace_joins(each)
            if isinstance(each, nodes.Concat):
                values[number] = _call("joined", each.nodes)
        if values is not value and isinstance(value, nodes.Node):
            setattr(node, name, values[0])


def _bounded(name: str, made: Any) -> Any:
    """A filter with a check. Some filters get the context before the value."""
    place = 1 if hasattr(made, "jinja_pass_arg") else 0

    @functools.wraps(made)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_time()
        _check_growth(name, args[place], (*args[place + 1 :], *kwargs.values()))
        return made(*args, **kwargs)

    return checked


def _check_growth(name: str, text: Any, args: tuple[Any, ...]) -> None:
    """Refuse a method or filter of strings whose result would be too large."""
    text = text if isinstance(text, str) else ""
    numbers = [arg for arg in args if isinstance(arg, int)]
    times = text.count("\n") + text.count("\t") + 1 if name in ("indent", "expandtabs") else 1
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs", "indent", "format"):
        _check_size(max(numbers, default=0) * times)
        if name == "format" and _WIDTH.search(text):
            _check_size(MAX_CHARACTERS + 1)
    strings = [arg for arg in args if isinstance(arg, str)]
    if name == "replace" and len(strings) > 1:
        _check_size(len(text) + text.count(strings[0]) * len(strings[1]))


def _check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise TemplateError(f"makes more than {MAX_CHARACTERS:,} characters")


def _check_time() -> None:
    if time.monotonic() > _ENDS.get(float("inf")):
        raise TemplateError(f"takes more than {MAX_SECONDS:g} s")
