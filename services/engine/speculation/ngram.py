"""Drafts by prompt lookup: what followed the last tokens where they occurred before."""

from collections.abc import Sequence as Seq
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from services.engine.sequences.sequence import Sequence

Tokens = NDArray[np.int32]


class NgramDrafter:
    """Looks for the last `longest` down to `shortest` tokens in the rest of the sequence, prompt
    included. The latest of the longest matches decides:

        tokens   a b c d e f ... x b c d e y ... b c        match: b c, from the second b on
        drafts                                       d e y

    A match that ends shortly before the end of the sequence repeats, as a loop does.
    """

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._histories: WeakKeyDictionary[Sequence, _History] = WeakKeyDictionary()

    def prepare(self, asked: Seq[tuple[Sequence, int]], *, may_catch_up: bool) -> list[int]:
        return [number for _, number in asked]

    def propose(self, asked: Seq[tuple[Sequence, int]]) -> list[tuple[int, ...]]:
        return [self._follow(self._history(sequence), number) for sequence, number in asked]

    def _history(self, sequence: Sequence) -> Tokens:
        history = self._histories.get(sequence)
        if history is None:
            history = self._histories[sequence] = _History()
        return history.update(sequence.tokens)

    def _follow(self, tokens: Tokens, number: int) -> tuple[int, ...]:
        if (begin := self._after_match(tokens)) is None:
            return ()
        period = len(tokens) - begin
        return tuple(tokens[begin + np.arange(number) % period].tolist())

    def _after_match(self, tokens: Tokens) -> int | None:
        """The position after the match; None: there is none."""
        size, last = self._shortest, len(tokens) - 1
        if last < size:
            return None
        is_match = tokens[size - 1 : last] == tokens[last]
        for back in range(1, size):
            is_match &= tokens[size - 1 - back : last - back] == tokens[last - back]
        ends = np.flatnonzero(is_match) + size
        for longer in range(size, self._longest):
            if not len(ends):
                break
            candidates = ends[ends > longer]
            candidates = candidates[tokens[candidates - longer - 1] == tokens[last - longer]]
            if not len(candidates):
                break
            ends = candidates
        return int(ends[-1]) if len(ends) else None


class _History:
    """The tokens of a sequence as an array, which grows with the sequence."""

    def __init__(self) -> None:
        self._array: Tokens = np.zeros(0, np.int32)
        self._size = 0

    def update(self, tokens: list[int]) -> Tokens:
        if len(tokens) > len(self._array):
            array = np.zeros(len(tokens) * 3 // 2 + 64, np.int32)
            array[: self._size] = self._array[: self._size]
            self._array = array
        self._array[self._size : len(tokens)] = tokens[self._size :]
        self._size = len(tokens)
        return self._array[: self._size]
