"""Ends a text before the first stop string and never shows a character of one, or behind it."""

from collections.abc import Sequence
from dataclasses import dataclass

from services.common.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Scanned:
    """`text` is certain to be shown. `stop`: the string that the text ended with; nothing more may
    be pushed then."""

    text: str
    stop: str | None = None


class StopMatcher:
    """Watches one sequence's text for its stop strings.

    The stop string that is complete first ends the text; of several that end at the same character
    the longest, so that nothing of it is left over. How the text was cut into pieces makes no
    difference. `included`: the stop string is part of the text.
    """

    def __init__(self, stops: Sequence[str], *, included: bool = False) -> None:
        if "" in stops:
            raise InvalidRequest("a stop string is empty")
        self._included = included
        # Longest first: `_complete` takes the first that is there.
        self._trackers = [_Tracker(stop) for stop in sorted(set(stops), key=len, reverse=True)]
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> Scanned:
        """Text that may still become a stop string that is not shown is held back. `may_end`:
        whether a stop string counts that is complete with a character of `text`."""
        if not self._trackers:
            return Scanned(text)
        seen = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            stop = self._advance(char, may_end)
            if stop is not None:
                self._held = ""
                return Scanned(seen[: end if self._included else end - len(stop)], stop)
        num_held = 0 if self._included else max(t.num_matched for t in self._trackers)
        certain = len(seen) - num_held
        self._held = seen[certain:]
        return Scanned(seen[:certain])

    def flush(self) -> str:
        """At the end: what was held back has become no stop string."""
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
    """How much of one stop string the text ends with (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._borders = _borders(stop)

    def advance(self, char: str) -> None:
        while self.num_matched and self.stop[self.num_matched] != char:
            self.num_matched = self._borders[self.num_matched]
        self.num_matched += self.stop[self.num_matched] == char

    def pass_over(self) -> None:
        """The stop string is complete, and does not count: another one may begin within it."""
        self.num_matched = self._borders[-1]


def _borders(word: str) -> list[int]:
    """[n]: length of the longest proper prefix of word[:n] that is also its suffix."""
    borders = [0, 0]
    for char in word[1:]:
        length = borders[-1]
        while length and word[length] != char:
            length = borders[length]
        borders.append(length + (word[length] == char))
    return borders
