"""What the engine hands to the runner for one forward pass: rows, each with any number of new
tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from services.engine.sampling.adjustment import Adjustment
from services.protocol.logprobs import Logprobs
from services.protocol.ticket import SamplingParams

Pause = Callable[[float], object]
"""Returns after so many seconds, or sooner, when somebody waits for a step."""


class Fault(Enum):
    """Why a row that was to draw has no token."""

    NOT_FINITE = "the model's output for it is not finite"


@dataclass(frozen=True, slots=True)
class Draw:
    """Sample one token after a row's last position. The generator is keyed by (seed, sequence
    index, position). `adjustment`: what the sequence's tokens make of the logits; None: nothing."""

    sampling: SamplingParams
    sequence_index: int
    adjustment: Adjustment | None = None

    @property
    def is_plain(self) -> bool:
        """It takes the likeliest token of the logits as they are."""
        return self.sampling.temperature == 0 and self.adjustment is None


@dataclass(frozen=True, slots=True)
class Scoring:
    """Tell how likely tokens were that are there already: of those behind each of a row's first
    tokens, with the `num_top` likeliest beside each."""

    token_ids: Sequence[int]
    num_top: int


@dataclass(frozen=True, slots=True)
class Row:
    """New tokens of one sequence: prefill, a chunk of it, or one decode step, by their number
    alone.

    `token_ids` stand at positions start .. start + len(token_ids) - 1; the KV of positions below
    `start` is in the blocks of `block_table` already. KV of positions below `store_from` is not
    stored (slot -1): they lie in adopted blocks. `draws`: none where the row ends before the
    sequence does, several, alike in all but their index, where a group's sequences begin with the
    same tokens. `scoring` is None where nobody asks for logprobs of the prompt.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    store_from: int = 0
    draws: tuple[Draw, ...] = ()
    scoring: Scoring | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """What a row comes to that has logprobs to tell: of the tokens drawn, if its sampling asks for
    them, and of those that its `scoring` asks for."""

    tokens: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    prompt: tuple[Logprobs, ...] = ()


Drawn = tuple[int, ...] | Told | Fault
"""What a row comes to: a token for each of its draws, or a fault of this row alone."""


@dataclass(frozen=True, slots=True)
class Query:
    """A token that stands at `position`, after a state of the step: which one it is to be, or which
    it is already. `num_top`: how likely it is, with so many of the likeliest; None: not asked."""

    state: int
    token: Draw | int
    position: int
    num_top: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """To a query. `logprobs`: where they were asked for."""

    token_id: int
    logprobs: Logprobs | None = None
