"""Pools the final states of a prompt into its embedding."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.protocol.messages import Pooling, PoolingMode

States = NDArray[np.floating[Any]]
"""Final states of some tokens of a sequence, [tokens, hidden], or their sum, [1, hidden]."""


@dataclass(frozen=True, slots=True)
class ScoreHead:
    """The head of a cross-encoder, which turns the last state of a pair of texts into a score."""

    weight: NDArray[np.float64]
    is_sigmoid: bool

    def score(self, state: NDArray[np.float64]) -> float:
        logit = math.fsum((self.weight * state).tolist())
        return (1 + math.tanh(logit / 2)) / 2 if self.is_sigmoid else logit


class Pooler:
    """Collects the states of one sequence, chunk by chunk.

    The sum of a mean is in fp64. Where the states come one by one, it runs from the first position
    to the last, so its bits depend neither on the chunks nor on the batch.
    """

    def __init__(self, pooling: Pooling, head: ScoreHead | None = None) -> None:
        self._pooling, self._head = pooling, head
        self._total: NDArray[np.float64] | None = None

    def num_states(self, num_tokens: int, *, is_last: bool) -> int:
        """How many of a row's last states the pooling needs."""
        if self._pooling.mode is PoolingMode.MEAN:
            return num_tokens
        return int(is_last)

    def add(self, states: States) -> None:
        if not len(states):
            return
        values = states.astype(np.float64)
        if self._total is not None:
            values = np.concatenate([self._total[None], values])
        self._total = np.add.accumulate(values, axis=0)[-1]  # one position after another

    def embedding(self) -> tuple[float, ...]:
        """The first `dimensions` values of the pooled state, with length 1, rounded to fp32. (The
        sum of a mean has its direction: it is not divided by the number of tokens.) The only value
        of a cross-encoder is its score."""
        assert self._total is not None
        if self._head is not None:
            return (self._head.score(self._total),)
        values = self._total[: self._pooling.dimensions]
        length = math.sqrt(math.fsum((values * values).tolist()))
        normalized = values / length if length else values
        return tuple(normalized.astype(np.float32).tolist())
