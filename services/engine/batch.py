"""Types that cross between engine, runner and model: the rows of a step, and their results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.engine.sampling.adjustment import Adjustment
from services.engine.sequences.grammar_state import GrammarState
from services.protocol.logprobs import LogprobColumns, Logprobs
from services.protocol.ticket import SamplingParams

Wait = Callable[[float], object]
"""Waits for the given seconds; returns earlier if a group is waiting for its first step."""


class Fault(Enum):
    """Why a row failed. The other rows of its step are not affected."""

    NOT_FINITE = "the model's output for it is not finite"
    GRAMMAR = "its structured output cannot go on, or only at too great a cost"


@dataclass(frozen=True, slots=True)
class Draw:
    """A request to sample one token after a row's last position. The random numbers are a function
    of (seed, sequence index, position)."""

    sampling: SamplingParams
    sequence_index: int
    adjustment: Adjustment | None = None
    """The changes of the logits by penalties, biases and bans; None changes nothing."""
    grammar: GrammarState | None = None
    """The grammar that decides, beside the forward pass, which tokens may come; None allows all."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """A request for the logprobs of tokens that are given, as for a prompt."""

    token_ids: Sequence[int]
    """The token that follows each token of the row."""
    num_top: int
    """The number of likeliest tokens to add."""


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class LoadedAdapter:
    """A LoRA adapter at this worker."""

    digest: str
    weights: Any
    """The weights as `Model.load_adapter` has made them."""


class Owner:
    """Stands for a sequence in a device's token table, which forgets it when nothing refers to it
    any more. (Flights keep their rows, and a sequence's drafts keep their flights: if a row had the
    sequence itself, none of them would ever be freed.)"""


@dataclass(frozen=True, slots=True)
class Row:
    """The tokens of one sequence that a step computes: a prompt, a chunk of one, or one token of a
    decoding sequence. Nothing but their number tells these apart."""

    token_ids: Sequence[int]
    """The tokens at the positions from `start` on that the host knows."""
    start: int
    block_table: Sequence[int]
    """The sequence's blocks, which already have the KV of the positions below `start`."""
    store_from: int = 0
    """The first position with KV to store. Positions before it are in adopted blocks (slot -1)."""
    draws: tuple[Draw, ...] = ()
    """The draws after the last token; empty if the row ends before its sequence does. If several
    sequences of a group begin with these tokens, each has one, equal but for the index."""
    scoring: Scoring | None = None
    """None if the request asks for no prompt logprobs."""
    owner: Owner | None = None
    """The sequence, for which a device keeps the drawn tokens in its token table; None if no row
    reads them there."""
    num_on_device: int = 0
    """The number of tokens behind `token_ids` that the host does not know: they are in the token
    table."""
    num_unknown: int = 0
    """The number of drafts before the first token of which the host does not know yet whether they
    are accepted. `start` and the positions of the draws are those behind no accepted draft; the
    device adds the number of accepted drafts. All tokens of such a row are on the device. No row of
    such a step has a `draw_behind`."""
    draw_behind: Callable[[tuple[int, ...]], Draw] | None = None
    """The function that makes the row's one draw from its one token, which is on the device, if
    penalties or a grammar depend on the token; `draws` has the draw without them."""
    num_states: int = 0
    """The number of last tokens whose final states are pooled; such a row neither draws nor
    scores."""
    num_drafts: int = 0
    """The number of drafts at the end of the tokens. `draws` has one draw for each of them, after
    the token before it, and one after the last token."""
    adapter: LoadedAdapter | None = None
    """The row's adapter. The rows of a step are grouped by adapter, rows without one first."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) + self.num_on_device


@dataclass(frozen=True, slots=True)
class RowOutput:
    """The result of a row that asks for logprobs or states."""

    tokens: tuple[int, ...]
    """One token for each draw."""
    logprobs: tuple[Logprobs, ...] = ()
    """The logprobs of `tokens`, if the sampling parameters ask for them."""
    prompt: LogprobColumns | None = None
    """The logprobs of the row's `scoring`; None if the row has none."""
    states: NDArray[np.floating[Any]] | None = None
    """The final states [num_states, hidden], or from a device that draws their sum [1, hidden];
    None if the row asks for none."""


RowResult = tuple[int, ...] | RowOutput | Fault
"""The result of a row: a token for each of its draws, with or without logprobs, or its fault."""


def with_draws_behind(
    rows: Sequence[Row], before: Sequence[Row], results: Sequence[RowResult]
) -> list[Row]:
    """The rows with the draws that depend on tokens of the step before, which had the rows `before`
    and these results. A row behind a fault keeps the draw that it has, since its result is
    dropped."""
    drawn = dict(zip((row.owner for row in before), results, strict=True))
    return [_with_draw_behind(row, drawn) for row in rows]


def _with_draw_behind(row: Row, drawn: Mapping[Owner | None, RowResult]) -> Row:
    if row.draw_behind is None:
        return row
    result = drawn[row.owner]
    if isinstance(result, Fault):
        return replace(row, draw_behind=None)
    tokens = result.tokens if isinstance(result, RowOutput) else result
    return replace(row, draws=(row.draw_behind(tokens),), draw_behind=None)
