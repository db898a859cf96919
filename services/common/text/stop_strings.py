"""Ends a text before the first stop string, and never shows a character of one."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Scanned:
    """`text` is certain to come before any stop string. `stop`: the one that the text ended with;
    nothing more may be pushed then."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Watches one sequence's text for its stop strings.

    The stop string that is complete first ends the text; of several that end at the same character
    the longest, so that nothing of it is left over. How the text was cut into pieces makes no
    difference.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if "" in stops:
            raise InvalidRequest("a stop string is empty")
        # Longest first: `_complete` takes the first that is there.
        self._trackers = [_Tracker(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""

    def push(self, text: str) -> Scanned:
        """Text that may still become a stop string is held back."""
        if not self._trackers:
            return Scanned(text)
        seen = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            stop = self._advance(char)
            if stop is not None:
                self._held = ""
                return Scanned(seen[: end - len(stop)], stop)
        certain = len(seen) - max(tracker.num_matched for tracker in self._trackers)
        self._held = seen[certain:]
        return Scanned(seen[:certain])

    def flush(self) -> str:
        """At the end: what was held back has become no stop string."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        for tracker in self._trackers:
            tracker.advance(char)
        return next((t.stop for t in self._trackers if t.num_matched == len(t.stop)), None)


class _Tracker:
    """How much of one stop string the text ends with (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = _borders(stop)

    def advance(self, char: str) -> None:
        while self.num_matched and self.stop[self.num_matched] != char:
            self.num_matched = self._borders[self.num_matched]
        self.num_matched += self.stop[self.num_matched] == char


def _borders(word: str) -> list[int]:
    """[n]: length of the longest proper prefix of word[:n] that is also its suffix."""
    borders = [0, 0]
    for char in word[1:-1]:
        length = borders[-1]
        while length and word[length] != char:
            length = borders[length]
        borders.append(length + (word[length] == char))
    return borders
