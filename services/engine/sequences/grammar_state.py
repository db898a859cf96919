"""The grammar state of a sequence: which tokens its structured output allows next.

It is a function of the tokens alone (law 7), like the penalty state: after a preemption, a move or
a crash a new state walks the tokens again.
"""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING

from services.model.structured.mask import Mask

if TYPE_CHECKING:  # the class needs the grammar library, which a check of a GPU does not have
    from services.model.structured.grammar import Grammar


class GrammarState:
    """The grammar state of one sequence. `tokens` is the sequence's own list, which grows; it
    begins with `num_prompt` prompt tokens, which the grammar does not see. `drafts` may come behind
    them."""

    def __init__(self, grammar: "Grammar", tokens: Sequence[int], num_prompt: int) -> None:
        self._walk = grammar.walk()
        self._tokens = tokens
        self._num_prompt = num_prompt
        self._drafts: tuple[int, ...] = ()

    def behind(self, drafts: tuple[int, ...]) -> "GrammarState":
        """The state behind drafts, until the sequence gets its next token."""
        state = copy(self)
        state._drafts = drafts
        return state

    def mask(self) -> Mask:
        """The tokens that may come next. Raises GrammarFault, also if a draft may not come."""
        text = (*self._tokens[self._num_prompt :], *self._drafts)
        return self._walk.mask_after(text, len(self._drafts))
