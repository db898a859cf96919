"""Masks of grammars, computed in a thread while the forward pass runs.

    engine thread   | launch | forward pass (native, or on a device) | wait | draw |
    mask thread              |== masks of the step's draws ==|

The thread holds the interpreter's lock only between two grammars.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from services.engine.batch import Answer, Draw, Fault, Query
from services.engine.sampling.adjustment import Adjustment
from services.engine.sequences.grammar_state import GrammarState
from services.model.structured.mask import GrammarFault, Mask

Masks = dict[GrammarState, Mask | None]
"""By grammar state, once for all draws of a sequence; None: the grammar cannot say."""


class StepMasks:
    """The masks of one step's queries; ready when they are first asked for."""

    def __init__(self, asked: Sequence[Query], computing: "Future[Masks] | None") -> None:
        self._asked = asked
        self._computing = computing

    def mask_of(self, query: Query) -> Mask | None:
        grammar = query.token.grammar if isinstance(query.token, Draw) else None
        if grammar is None or self._computing is None:
            return None
        return self._computing.result()[grammar]

    def applied(self) -> list[Query]:
        """The queries with the masks in their adjustments."""
        return [_masked(query, self.mask_of(query)) for query in self._asked]

    def checked(self, answers: Sequence[Answer | Fault]) -> Sequence[Answer | Fault]:
        """The answers, with a fault for each draw whose grammar could not say what may come."""
        if self._computing is None:
            return answers
        return [
            Fault.GRAMMAR if query.is_structured and self.mask_of(query) is None else answer
            for query, answer in zip(self._asked, answers, strict=True)
        ]


NO_MASKS = StepMasks((), None)


class MaskThread:
    """Computes the masks of one runner."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def begin(self, asked: Sequence[Query]) -> StepMasks:
        """Start to compute the masks of a step. Until they are ready, nothing may change the
        tokens of its sequences."""
        grammars = [query.token.grammar for query in asked if isinstance(query.token, Draw)]
        wanted = dict.fromkeys(grammar for grammar in grammars if grammar is not None)
        return StepMasks(asked, self._thread.submit(_masks, wanted) if wanted else None)


def _masks(grammars: Iterable[GrammarState]) -> Masks:
    return {grammar: _mask(grammar) for grammar in grammars}


def _mask(grammar: GrammarState) -> Mask | None:
    try:
        return grammar.mask()
    except GrammarFault:
        return None


def _masked(query: Query, mask: Mask | None) -> Query:
    if mask is None or isinstance(query.token, int):
        return query
    adjustment = query.token.adjustment
    masked = Adjustment.of_mask(mask) if adjustment is None else replace(adjustment, mask=mask)
    return replace(query, token=replace(query.token, adjustment=masked))
