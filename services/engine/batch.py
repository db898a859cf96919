"""Types that cross between engine, runner and model: the rows of a step, and their results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.engine.sampling.adjustment import Adjustment
from services.engine.sequences.grammar_state import GrammarState
from services.protocol.logprobs import Logprobs
from services.protocol.ticket import SamplingParams

UNKNOWN_TOKEN = 0
"""Stands in a row for a token that the host does not know yet: see `Row.drawn_by`."""

Wait = Callable[[float], object]
"""Waits for the given seconds; returns earlier if a group is waiting for its first step."""


class Fault(Enum):
    """Why a row failed. The other rows of its step are not affected."""

    NOT_FINITE = "the model's output for it is not finite"
    GRAMMAR = "its structured output cannot go on, or only at too great a cost"


@dataclass(frozen=True, slots=True)
class Draw:
    """A request to sample one token after a row's last position.

    The random numbers are a function of (seed, sequence index, position). `adjustment`: changes of
    the logits that follow from the sequence's tokens (penalties, biases, bans); None: no change.
    `grammar`: decides which tokens may come, beside the forward pass; None: all may.
    """

    sampling: SamplingParams
    sequence_index: int
    adjustment: Adjustment | None = None
    grammar: GrammarState | None = None


@dataclass(frozen=True, slots=True)
class Scoring:
    """A request for the logprobs of tokens that are given, as for a prompt.

    `token_ids[i]` follows token i of the row. `num_top`: how many of the likeliest tokens to add.
    """

    token_ids: Sequence[int]
    num_top: int


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoadedAdapter:
    """A LoRA adapter at this worker. `weights`: as the model has made them
    (`Model.load_adapter`)."""

    digest: str
    weights: Any


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens of one sequence that a step computes: a prompt, a chunk of one, or one token of a
    decoding sequence. Nothing but their number tells these apart.

    `token_ids` are at positions start .. start + len(token_ids) - 1; the blocks of `block_table`
    already have the KV of the positions below `start`. KV of positions below `store_from` is not
    stored (slot -1): they are in adopted blocks. `draws` is empty if the row ends before its
    sequence does. It has several draws, equal but for the index, if several sequences of a group
    begin with these tokens. `scoring` is None if the request asks for no prompt logprobs.
    `num_drafts`: the last so many of `token_ids` are drafts. Then `draws` has one draw for each of
    them, after the token before it, and one after the last token.
    `drawn_by`: the index of a row in the step launched before. That row draws this row's one token,
    and is not retired yet; `token_ids` has `UNKNOWN_TOKEN` instead. None: all tokens are known.
    `draw_behind`: makes the row's one draw from that token, because penalties or a grammar depend
    on it; `draws` has the draw without them. None: the draw does not depend on the token.
    `num_states`: of how many of its last tokens the final states are wanted as they are; such a row
    neither draws nor scores.
    `adapter`: what it is computed with; rows of a step are grouped by it, those without one first.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    store_from: int = 0
    draws: tuple[Draw, ...] = ()
    scoring: Scoring | None = None
    drawn_by: int | None = None
    draw_behind: Callable[[tuple[int, ...]], Draw] | None = None
    num_states: int = 0
    num_drafts: int = 0
    adapter: LoadedAdapter | None = None


@dataclass(frozen=True, slots=True)
class RowOutput:
    """The result of a row that asks for logprobs or states. `tokens`: one for each draw.
    `logprobs`: theirs, if the sampling parameters ask for them. `prompt`: those of the row's
    `scoring`. `states`: fp32 [num_states, hidden]; None if the row asks for none."""

    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    prompt: tuple[Logprobs, ...] = ()
    states: NDArray[np.float32] | None = None


RowResult = tuple[int, ...] | RowOutput | Fault
"""The result of a row: a token for each of its draws, with or without logprobs, or its fault."""


def with_draws_behind(rows: Sequence[Row], last: Sequence[RowResult]) -> list[Row]:
    """The rows with the draws that depend on tokens of the step before. `last`: the results of
    that step. A row behind a fault keeps the draw that it has, since its result is dropped."""
    return [_with_draw_behind(row, last) for row in rows]


def _with_draw_behind(row: Row, last: Sequence[RowResult]) -> Row:
    if row.draw_behind is None or row.drawn_by is None:
        return row
    result = last[row.drawn_by]
    if isinstance(result, Fault):
        return replace(row, draw_behind=None)
    tokens = result.tokens if isinstance(result, RowOutput) else result
    return replace(row, draws=(row.draw_behind(tokens),), draw_behind=None)
