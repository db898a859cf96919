"""The operator's output: notes of the supervisor on stdout, log lines of the services on stderr."""

import sys
from datetime import datetime
from typing import TextIO

_COLOURS = (36, 32, 35, 33, 34, 96, 92, 95)
_DIM = 2


class Console:
    """Prints notes and service lines. On a terminal each line of a service begins with the time and
    the service's name; elsewhere lines are unchanged, because the JSON in them has both."""

    def __init__(self, notes: TextIO | None = None, lines: TextIO | None = None) -> None:
        self._notes = notes or sys.stdout
        self._lines = lines or sys.stderr
        self._colours: dict[str, int] = {}

    @property
    def is_terminal(self) -> bool:
        return self._lines.isatty()

    def note(self, text: str) -> None:
        print(text, file=self._notes, flush=True)

    def line(self, service: str, text: str) -> None:
        time = f"\033[{_DIM}m{datetime.now():%H:%M:%S}\033[0m "
        prefix = f"{time}{self._painted(service)} " if self.is_terminal else ""
        print(prefix + text, file=self._lines, flush=True)

    def _painted(self, service: str) -> str:
        colour = self._colours.setdefault(service, _COLOURS[len(self._colours) % len(_COLOURS)])
        return f"\033[{_DIM};{colour}m{service:<13}\033[0m"
