"""Drafts by prompt lookup: what followed the last tokens where they occurred before."""

from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from itertools import accumulate
from operator import mul
from weakref import WeakKeyDictionary

from services.engine.sequences.sequence import Sequence
from services.engine.speculation.average import Average, acceptance

_MOST_PLACES = 256
"""So many places of a pair of tokens are looked at, the latest first: a bound on the time of a
search in a text that repeats one pair."""


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

    runs_ahead = False

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._acceptance = [acceptance() for _ in range(longest)]
        """The share of drafts that are right, by the length of the match before them, from 1 on.
        Matches longer than `longest` are as good as those of this length."""
        self._matches: WeakKeyDictionary[Sequence, _Match] = WeakKeyDictionary()

    def chances(self, sequence: Sequence, most: int) -> list[float]:
        match = self._matches.get(sequence)
        if match is None:
            match = self._matches[sequence] = _Match(self._shortest, self._acceptance)
        match.update(sequence.tokens)
        unknown = sequence.num_unknown  # 1 while it is drawn
        return match.chances(most + unknown)[unknown:]

    def propose(
        self, asked: Mapping[Sequence, int], *, may_catch_up: bool = True
    ) -> tuple[dict[Sequence, tuple[int, ...]], float]:
        drafts = {one: self._matches[one].follow(one.tokens, most) for one, most in asked.items()}
        return drafts, 0.0


class _Match:
    """The place where the last tokens of a sequence occurred before."""

    def __init__(self, shortest: int, acceptance: Seq[Average]) -> None:
        self._shortest = shortest
        self._longest = len(acceptance)
        self._acceptance = acceptance
        self._after_one: dict[int, int] = {}
        """The latest position behind each token, except the position behind the last token."""
        self._after_two: dict[int, int] = {}
        """The latest position behind each pair of tokens, with the same exception."""
        self._before = array("I")
        """For each position, the position before it that follows the same pair; 0 if there is
        none."""
        self._after = 0
        """The position behind the earlier tokens that match."""
        self._length = 0
        """The number of tokens that match; 0 if there is no match."""

    def chances(self, number: int) -> list[float]:
        """The chance of each draft, and of all before it: they lengthen the match."""
        if not self._length:
            return []
        lens = range(self._length, self._length + number)
        return list(accumulate((self._of(length).value for length in lens), mul))

    def update(self, tokens: list[int]) -> None:
        """Take the new tokens, and go on with the match while they are those behind it."""
        new = range(len(self._before), len(tokens))
        for place in new if self._length else ():
            is_right = tokens[self._after] == tokens[place]
            self._of(self._length).add(is_right)
            if not is_right:
                self._length = 0
                break
            self._after += 1
            self._length += 1
        for place in new:
            before = 0
            if place > 1:
                pair = _pair(tokens, place)
                before = self._after_two.get(pair, 0)
                self._after_two[pair] = place
            if place > 0:
                self._after_one[tokens[place - 1]] = place
            self._before.append(before)
        if new and not self._length:
            self._find(tokens)

    def follow(self, tokens: list[int], number: int) -> tuple[int, ...]:
        period = len(tokens) - self._after
        return tuple(tokens[self._after + i % period] for i in range(number))

    def _of(self, length: int) -> Average:
        return self._acceptance[min(length, self._longest) - 1]

    def _find(self, tokens: list[int]) -> None:
        """Find the latest of the longest matches."""
        after = 0
        if self._longest > 1 and len(tokens) > 1:
            after = self._after_two.get(_pair(tokens, len(tokens)), 0)
        for _ in range(_MOST_PLACES):
            if not after or self._length == self._longest:
                break
            length, most = 2, min(self._longest, after)
            while length < most and tokens[after - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > self._length:
                self._after, self._length = after, length
            after = self._before[after]
        if not self._length and tokens[-1] in self._after_one:
            self._after, self._length = self._after_one[tokens[-1]], 1
        if self._length < self._shortest:
            self._length = 0


def _pair(tokens: list[int], place: int) -> int:
    """The two tokens before a place, from 2 on, as a number."""
    return tokens[place - 2] << 32 | tokens[place - 1]
