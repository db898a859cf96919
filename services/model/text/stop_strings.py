"""Ends a text at the first stop string, and holds back text that may still become one."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.runtime.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Scanned:
    """The result of a push. `text` can be shown now. `stop` is the stop string that ended the text;
    the caller must not push more then."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Searches one sequence's text for its stop strings.

    The stop string that is complete first ends the text. If several end at the same character, the
    longest one counts, so that no part of it stays in the text. The result does not depend on how
    the text is divided into pushes. If `included`, the stop string is part of the text. Raises
    InvalidRequest if a stop string is empty.
    """

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        if "" in stops:
            raise InvalidRequest("a stop string is empty")
        self.included = included
        # Longest first: `_advance` returns the first complete one.
        self._trackers = [_Tracker(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> Scanned:
        """Scan more text; holds back the end that may still become a stop string, unless stop
        strings are `included`. `may_end=False` ignores stop strings that end within `text`."""
        if not self._trackers:
            return Scanned(text)
        seen = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            stop = self._advance(char, may_end)
            if stop is not None:
                self._held = ""
                return Scanned(seen[: end if self.included else end - len(stop)], stop)
        num_held = 0 if self.included else max(t.num_matched for t in self._trackers)
        certain = len(seen) - num_held
        self._held = seen[certain:]
        return Scanned(seen[:certain])

    def flush(self) -> str:
        """The text that is held back, at the end of the sequence: it has not become a stop
        string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str, may_end: bool) -> str | None:
        for tracker in self._trackers:
            tracker.advance(char)
        complete = [t for t in self._trackers if t.num_matched == len(t.stop)]
        if may_end:
            return complete[0].stop if complete else None
        for tracker in complete:
            tracker.pass_over()
        return None


class _Tracker:
    """Tracks the longest prefix of one stop string with which the text ends (Knuth, Morris and
    Pratt, 1977)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = _borders(stop)

    def advance(self, char: str) -> None:
        while self.num_matched and self.stop[self.num_matched] != char:
            self.num_matched = self._borders[self.num_matched]
        self.num_matched += self.stop[self.num_matched] == char

    def pass_over(self) -> None:
        """Ignore a complete stop string; another occurrence may begin within it."""
        self.num_matched = self._borders[-1]


def _borders(word: str) -> list[int]:
    """The borders of all prefixes: item n is the length of the longest proper prefix of word[:n]
    that is also its suffix."""
    borders = [0, 0]
    for char in word[1:]:
        length = borders[-1]
        while length and word[length] != char:
            length = borders[length]
        borders.append(length + (word[length] == char))
    return borders
