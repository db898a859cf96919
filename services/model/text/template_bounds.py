"""jinja2's sandbox with a limit of time and of output: a template renders in the gateway's threads,
and a client's messages decide how long it takes.

The limits are checked between expressions. The values that one expression makes on the way are
not measured.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from jinja2 import Template, TemplateError, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARACTERS = 64 << 20
"""The longest text of a template, a macro or a block. It is above the largest request, so that a
template has room for what it adds to one."""
MAX_SECONDS = 10.0

_end: ContextVar[float] = ContextVar("end", default=float("inf"))


@contextmanager
def time_bound(seconds: float = MAX_SECONDS) -> Iterator[None]:
    """Templates that render in the context end after so many seconds, with a TemplateError."""
    token = _end.set(time.monotonic() + seconds)
    try:
        yield
    finally:
        _end.reset(token)


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Checks the time in each turn of a loop and in each call of a macro, and the length of what is
    rendered."""

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        found, size = [], 0
        for part in parts:
            size += len(part)
            if size > MAX_CHARACTERS:
                raise TemplateError(f"makes more than {MAX_CHARACTERS:,} characters")
            found.append(part)
        return "".join(found)

    def check_time(self) -> None:
        if time.monotonic() > _end.get():
            raise TemplateError(f"takes more than {MAX_SECONDS:g} s")

    def bounded_template(self, source: str) -> Template:
        """Add the check of time to the loops and macros of a template. Raises TemplateError for
        wrong syntax."""
        template = self.parse(source)
        bodies = [loop.body for loop in template.find_all(nodes.For)]
        bodies += [macro.body for macro in template.find_all(nodes.Macro)]
        for body in bodies:
            check = nodes.Call(nodes.EnvironmentAttribute("check_time"), [], [], None, None)
            body.insert(0, nodes.ExprStmt(check))
        return self.from_string(template.set_environment(self))  # type: ignore[arg-type]
