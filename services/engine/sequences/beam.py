"""The rules of beam search, one step at a time: which continuations live on, which are finished,
and when the search is over.

    beams, best first   candidates of each      ranked over all        result (width 2)
      0  -1.2    ───▶   7: -0.1   3: -2.0   ─▶  0+7  -1.3              lives
      1  -1.5    ───▶   7: -0.3   4: -0.9       1+7  -1.8              lives
                                                1+4  -2.4 (eos)        dropped: not in the first 2
                                                0+3  -3.2              dropped: 2 live already

Results are equal to transformers' `generate(num_beams=...)`, version 5. Scores are added and
divided in fp32 as there. A candidate that ends its sequence becomes a hypothesis only if it ranks
among the first `width`; the `width` best of the others live on. Of equal scores the better beam
goes first, then the lower token id; transformers leaves that order open.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from quire.sampling import Beam
from services.protocol.logprobs import Logprobs
from services.protocol.ticket import FinishReason, Hypothesis


@dataclass(frozen=True, slots=True)
class LivingBeam:
    """A living beam: its generated tokens, and the sum of their logprobs (an fp32 value)."""

    token_ids: Sequence[int]
    score: float


@dataclass(frozen=True, slots=True)
class Continuation:
    """A beam's continuation by one token. `parent` is the rank of the beam among the living
    beams."""

    parent: int
    token_id: int
    score: float


@dataclass(frozen=True, slots=True)
class Step:
    """The result of one step, best first. If no beam lives, `finished` is the search's result."""

    living: tuple[Continuation, ...]
    finished: tuple[Hypothesis, ...]


FIRST = LivingBeam((), 0.0)
"""The one beam of a search after its prompt."""


def num_candidates(params: Beam, stop_ids: frozenset[int]) -> int:
    """How many candidates of each beam a step needs: all of the best `width` continuations may come
    from one beam, and at most its stop tokens rank before them."""
    return params.width + len(stop_ids)


class BeamSearch:
    """The beam search of one request; it has no state between steps."""

    def __init__(self, params: Beam, stop_ids: frozenset[int], max_tokens: int) -> None:
        self._params = params
        self._length_penalty = 1.0 if params.length_penalty is None else params.length_penalty
        self._stop_ids = stop_ids
        self._max_tokens = max_tokens

    def step(
        self,
        beams: Sequence[LivingBeam],
        finished: Iterable[Hypothesis],
        candidates: Sequence[Logprobs],
    ) -> Step:
        """Choose the continuations of `beams`, which all have the same length, best first.
        `finished` are the hypotheses so far, `candidates[i]` the likeliest tokens after
        `beams[i]`."""
        width = self._params.width
        num_tokens = len(beams[0].token_ids) + 1
        living, ended = [], []
        for rank, continuation in enumerate(_ranked(beams, candidates)):
            finish = self._finish(continuation.token_id, num_tokens)
            if finish is None:
                living.append(continuation)
            elif rank < width:
                tokens = (*beams[continuation.parent].token_ids, continuation.token_id)
                score = self._score(continuation.score, num_tokens)
                ended.append(Hypothesis(tokens, score, finish))
        best = sorted([*finished, *ended], key=lambda one: one.score, reverse=True)[:width]
        if self._is_over(living, best, num_tokens):
            living = []
        return Step(tuple(living[:width]), tuple(best))

    def _finish(self, token_id: int, num_tokens: int) -> FinishReason | None:
        if token_id in self._stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_tokens >= self._max_tokens else None

    def _is_over(
        self, living: Sequence[Continuation], finished: Sequence[Hypothesis], num_tokens: int
    ) -> bool:
        if not living:
            return True
        params = self._params
        if len(finished) < params.width:
            return False
        if params.early_stopping is True:
            return True
        # False compares the best beam as if it ended now, "never" at the best length for it.
        if params.early_stopping == "never" and self._length_penalty > 0:
            num_tokens = self._max_tokens
        return self._score(living[0].score, num_tokens) <= finished[-1].score

    def _score(self, total: float, num_tokens: int) -> float:
        penalty = num_tokens**self._length_penalty
        return float(np.float32(total) / np.float32(penalty))


def _ranked(beams: Sequence[LivingBeam], candidates: Sequence[Logprobs]) -> Iterator[Continuation]:
    """All candidate continuations, best first."""
    scores = np.array([beam.score for beam in beams], dtype=np.float32)
    logprobs = np.array([of_beam.top_logprobs for of_beam in candidates], dtype=np.float32)
    token_ids = np.array([of_beam.top_token_ids for of_beam in candidates])
    totals = scores[:, np.newaxis] + logprobs
    parents = np.broadcast_to(np.arange(len(beams))[:, np.newaxis], totals.shape)
    order = np.lexsort((token_ids.ravel(), parents.ravel(), -totals.ravel()))
    for i in order:
        parent, column = divmod(int(i), totals.shape[1])
        yield Continuation(parent, int(token_ids[parent, column]), float(totals[parent, column]))
