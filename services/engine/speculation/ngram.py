"""Drafts by prompt lookup: what followed the last tokens where they occurred before."""

from array import array
from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

from services.engine.forward import Flight
from services.engine.sequences.sequence import Sequence
from services.engine.speculation.average import Average

_LONGEST = 8
"""Longer matches are as good as this one."""
_NUM_OF_ONE, _NUM_OF_ALL = 16, 64
"""How many drafts after matches of a length make its chance, in one sequence and in all of them."""
_MOST_PLACES = 256
"""So many places of a pair of tokens are looked at, the latest first."""


class Chances:
    """The chance of a draft by the length of the match before it, from 1 on; at first about what
    it is in answers that quote documents."""

    def __init__(self, before: "Chances | None" = None) -> None:
        """A new sequence begins with `before` of all sequences."""
        if before is None:
            self._of = [Average(min(0.2 * m, 0.95), _NUM_OF_ALL) for m in range(1, _LONGEST + 1)]
        else:
            self._of = [Average(one.value, _NUM_OF_ONE) for one in before._of]

    def of(self, length: int) -> Average:
        return self._of[min(length, _LONGEST) - 1]

    def ahead(self, length: int, number: int) -> list[float]:
        """The chance of each draft behind a match, and of all before it: they lengthen it."""
        chances, product = [], 1.0
        for drafted in range(number):
            product *= self.of(length + drafted).value
            chances.append(product)
        return chances


class NgramDrafter:
    """Looks for the last `longest` down to `shortest` tokens in the rest of the sequence, prompt
    included. The latest of the longest matches decides:

        tokens   a b c d e f ... x b c d e y ... b c        match: b c, from the second b on
        drafts                                       d e y

    A match that ends shortly before the end of the sequence repeats, as a loop does. A match goes
    on, and becomes longer, as long as the tokens behind it come again, whether they were drafts or
    not. So each token tells how good the matches of a length are, and costs nothing to learn from.

    A match ends at a token that was no draft. The drafter looks for the next match by that token
    and the tokens before it, so it proposes drafts once the host knows the tokens.
    """

    runs_ahead = catches_up = False

    def __init__(self, shortest: int, longest: int) -> None:
        self._sizes = shortest, longest
        self._matches: WeakKeyDictionary[Sequence, _Match] = WeakKeyDictionary()
        self._chances = Chances()

    def chances(self, sequence: Sequence, most: int) -> list[float]:
        match = self._matches.get(sequence)
        if match is None:
            match = self._matches[sequence] = _Match(*self._sizes, self._chances)
        match.update(sequence.tokens)
        unknown = sequence.num_unknown  # 1 while it is drawn
        chances = match.chances.ahead(match.length, most + unknown) if match.length else []
        return chances[unknown:]

    def prepare(self, asked: Seq[tuple[Sequence, int]], *, may_catch_up: bool) -> list[int]:
        return [number for _, number in asked]

    def propose(
        self, asked: Seq[tuple[Sequence, int]], behind: Flight | None = None
    ) -> list[tuple[int, ...]]:
        return [
            self._matches[sequence].follow(sequence.tokens, number) for sequence, number in asked
        ]


class _Match:
    """The place where the last tokens of a sequence occurred before."""

    def __init__(self, shortest: int, longest: int, of_all: Chances) -> None:
        self._shortest = shortest
        self._longest = longest
        self._of_all = of_all
        self.chances = Chances(of_all)
        self._after_one: dict[int, int] = {}
        """The latest position behind each token, except the position behind the last token."""
        self._after_two: dict[int, int] = {}
        """The latest position behind each pair of tokens, with the same exception."""
        self._before = array("I")
        """For each position, the position before it that follows the same pair; 0 if there is
        none."""
        self._after = 0
        """The position behind the earlier tokens that match."""
        self.length = 0
        """The number of tokens that match."""

    def update(self, tokens: list[int]) -> None:
        """Take the new tokens, and go on with the match while they are those behind it."""
        new = range(len(self._before), len(tokens))
        for place in new if self.length else ():
            is_right = tokens[self._after] == tokens[place]
            for chances in (self.chances, self._of_all):
                chances.of(self.length).add(is_right)
            if not is_right:
                self.length = 0
                break
            self._after += 1
            self.length += 1
        for place in new:
            before = 0
            if place > 1:
                pair = _pair(tokens, place)
                before = self._after_two.get(pair, 0)
                self._after_two[pair] = place
            if place > 0:
                self._after_one[tokens[place - 1]] = place
            self._before.append(before)
        if new and not self.length:
            self._find(tokens)

    def follow(self, tokens: list[int], number: int) -> tuple[int, ...]:
        period = len(tokens) - self._after
        return tuple(tokens[self._after + i % period] for i in range(number))

    def _find(self, tokens: list[int]) -> None:
        """Find the latest of the longest matches."""
        after = 0
        if self._longest > 1 and len(tokens) > 1:
            after = self._after_two.get(_pair(tokens, len(tokens)), 0)
        for _ in range(_MOST_PLACES):
            if not after or self.length == self._longest:
                break
            length = self._length(tokens, after)
            if length > self.length:
                self._after, self.length = after, length
            after = self._before[after]
        if not self.length and tokens[-1] in self._after_one:
            self._after, self.length = self._after_one[tokens[-1]], 1
        if self.length < self._shortest:
            self.length = 0

    def _length(self, tokens: list[int], after: int) -> int:
        """How many tokens before `after` are the last ones; two are."""
        length, most = 2, min(self._longest, after)
        while length < most and tokens[after - 1 - length] == tokens[-1 - length]:
            length += 1
        return length


def _pair(tokens: list[int], place: int) -> int:
    """The two tokens before a place, from 2 on, as a number."""
    return tokens[place - 2] << 32 | tokens[place - 1]
