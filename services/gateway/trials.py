"""Requests over which a worker has died, one at a time at the next one."""

from typing import Protocol


class Suspect(Protocol):
    def begin(self) -> None:
        """Its turn has come."""


class Trials:
    """Those that are sent to one worker: the first is there, the others stand in line. Should the
    worker die too, it is known over whom."""

    def __init__(self) -> None:
        self._line: list[Suspect] = []

    def enter(self, suspect: Suspect) -> None:
        self._line.append(suspect)
        if self._line[0] is suspect:
            suspect.begin()

    def leave(self, suspect: Suspect) -> None:
        """It has shown a token, or gone elsewhere. Who was not there is no error."""
        if suspect not in self._line:
            return
        was_first = self._line[0] is suspect
        self._line.remove(suspect)
        if was_first and self._line:
            self._line[0].begin()
