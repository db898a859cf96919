"""The penalty state of a sequence: how its tokens change the logits of its next draw.

The result is a function of the tokens alone (law 7). Only token counts are kept from draw to draw;
each draw adds the tokens that are new since the last.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np

from services.engine.sampling.adjustment import Adjustment, Ids, Values
from services.protocol.ticket import SamplingParams


class PenaltyState:
    """The penalty state of one sequence.

    `tokens` is the sequence's own list, which grows; it begins with `num_prompt` prompt tokens.
    `end_token_ids` are the tokens that `min_tokens` bans.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        tokens: list[int],
        num_prompt: int,
        end_token_ids: Collection[int],
    ) -> None:
        self._sampling = sampling
        self._tokens = tokens
        self._num_prompt = num_prompt
        self._biased = _ids([token_id for token_id, _ in sampling.logit_bias])
        self._biases = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self._allowed = _ids(sampling.allowed_token_ids) if sampling.allowed_token_ids else None
        self._bad_words = _BadWords(sampling.bad_words)
        self._ends = _ids(sorted(end_token_ids))
        self._counts = _Counts(tokens[:num_prompt] if sampling.repetition_penalty != 1 else ())
        self._num_counted = num_prompt

    @staticmethod
    def is_needed(sampling: SamplingParams) -> bool:
        """Whether a request with these parameters needs a penalty state."""
        return bool(
            sampling.logit_bias
            or sampling.allowed_token_ids
            or sampling.bad_words
            or sampling.min_tokens
            or _penalizes(sampling)
        )

    def adjustment(self) -> Adjustment | None:
        """The adjustment of the next draw; None if it changes no logit."""
        sampling = self._sampling
        seen, counts = self._seen()
        banned = self._banned()
        if self._allowed is None and not (len(self._biased) or len(seen) or len(banned)):
            return None
        return Adjustment(
            biased=self._biased,
            biases=self._biases,
            seen=seen,
            counts=counts,
            repetition=sampling.repetition_penalty,
            frequency=sampling.frequency_penalty,
            presence=sampling.presence_penalty,
            allowed=self._allowed,
            banned=banned,
            state=self,
        )

    def adjustments(self, drafts: tuple[int, ...]) -> list[Adjustment | None]:
        """The adjustments of the next draw, and of the draw behind each draft."""
        found = [_frozen(self.adjustment())]
        for draft in drafts:
            self._tokens.append(draft)
            found.append(_frozen(self.adjustment()))
        for draft in reversed(drafts):
            self._tokens.pop()
            if self._num_counted > len(self._tokens):
                self._counts.remove(draft)
                self._num_counted -= 1
        return found

    def _seen(self) -> tuple[Ids, Values]:
        """The tokens that penalties affect, and how often each is in the output."""
        if _penalizes(self._sampling):
            for position in range(self._num_counted, len(self._tokens)):
                self._counts.add(self._tokens[position])
            self._num_counted = len(self._tokens)
        return self._counts.arrays()

    def _banned(self) -> Ids:
        banned = self._bad_words.after(self._tokens, self._num_prompt)
        if len(self._tokens) - self._num_prompt < self._sampling.min_tokens:
            return np.concatenate([banned, self._ends])
        return banned


class _Counts:
    """Counts of added tokens. The tokens of `first` are present from the start, with count 0."""

    def __init__(self, first: Iterable[int]) -> None:
        self._slots = {token: slot for slot, token in enumerate(dict.fromkeys(first))}
        self._num_first = len(self._slots)
        self._ids = _ids(self._slots)
        self._counts = np.zeros(len(self._slots), np.float32)

    def add(self, token: int) -> None:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            more = max(64, slot)
            self._ids = np.concatenate([self._ids, np.zeros(more, np.int64)])
            self._counts = np.concatenate([self._counts, np.zeros(more, np.float32)])
        self._ids[slot] = token
        self._counts[slot] += 1

    def remove(self, token: int) -> None:
        """Undo the last `add` that is not undone, which was of this token."""
        slot = self._slots[token]
        self._counts[slot] -= 1
        if not self._counts[slot] and slot >= self._num_first:
            del self._slots[token]

    def arrays(self) -> tuple[Ids, Values]:
        """The tokens, each once, and their counts: views that the next `add` changes."""
        size = len(self._slots)
        return self._ids[:size], self._counts[:size]


class _BadWords:
    """The bad words: each bans its last token where the tokens before that were just generated."""

    def __init__(self, words: Iterable[Sequence[int]]) -> None:
        self._alone: list[int] = []
        self._by_last: dict[int, list[tuple[list[int], int]]] = {}
        for *before, last in words:
            if before:
                self._by_last.setdefault(before[-1], []).append((before, last))
            else:
                self._alone.append(last)
        self._always = _ids(self._alone)

    def after(self, tokens: Sequence[int], begin: int) -> Ids:
        """The tokens that may not follow `tokens`. A bad word must begin at `begin` or later."""
        if len(tokens) == begin or not (candidates := self._by_last.get(tokens[-1])):
            return self._always
        completed = [
            last
            for before, last in candidates
            if len(tokens) - len(before) >= begin and tokens[-len(before) :] == before
        ]
        return _ids([*self._alone, *completed])


def _frozen(adjustment: Adjustment | None) -> Adjustment | None:
    """A copy with arrays that no `add` changes."""
    if adjustment is None:
        return None
    return replace(adjustment, seen=adjustment.seen.copy(), counts=adjustment.counts.copy())


def _penalizes(sampling: SamplingParams) -> bool:
    return bool(
        sampling.repetition_penalty != 1 or sampling.presence_penalty or sampling.frequency_penalty
    )


def _ids(token_ids: Collection[int]) -> Ids:
    return np.fromiter(token_ids, np.int64, len(token_ids))
