"""Rows of the step that takes the most memory beside its forward pass: every row draws with top_k
and top_p, penalties, a grammar and logprobs, a prompt asks for logprobs too, and the others need
the states of all their tokens, as an embedding does."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from services.engine.batch import Draw, Row, Scoring
from services.engine.sampling.adjustment import Adjustment
from services.model.structured.mask import Mask
from services.protocol.logprobs import MAX_LOGPROBS
from services.protocol.ticket import SamplingParams

_SAMPLING = SamplingParams(
    temperature=1.0, top_k=2, top_p=0.9, min_p=0.1, seed=0, max_tokens=1, logprobs=MAX_LOGPROBS
)


class _AnyToken:
    """The state of a grammar that all tokens follow."""

    def __init__(self, vocab_size: int) -> None:
        self._mask = np.full(-(-vocab_size // 32), -1, np.int32)

    def mask(self) -> Mask:
        return self._mask


class _Penalties:
    """The sequence of an adjustment: see `Adjustment.state`."""


def largest_rows(lens: Sequence[int], block_size: int, vocab_size: int) -> list[Row]:
    """Rows of so many tokens each, all in block 0, that store no KV."""
    grammar: Any = _AnyToken(vocab_size)
    none, no_values = np.zeros(0, np.int64), np.zeros(0, np.float32)
    rows = []
    for index, length in enumerate(lens):
        penalties = Adjustment(
            none,
            no_values,
            none,
            no_values,
            1.1,
            0.1,
            0.1,
            None,
            none,
            state=_Penalties(),
        )
        draw = Draw(_SAMPLING, index, penalties, grammar)
        blocks, is_scored = [0] * -(-length // block_size), index == 0
        scoring = Scoring([0] * length, MAX_LOGPROBS) if is_scored else None
        num_states = 0 if is_scored else length
        rows.append(Row([0] * length, 0, blocks, length, (draw,), scoring, num_states=num_states))
    return rows
