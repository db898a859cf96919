"""Masks of grammars, computed in a thread while the forward pass runs.

    engine thread   | launch | forward pass (native, or on a device) | wait | draw |
    mask thread              |== masks of the step's draws ==|

The thread holds the interpreter's lock only between two grammars.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from services.engine.batch import Draw
from services.engine.sequences.grammar_state import GrammarState
from services.model.structured.mask import GrammarFault, Mask

Masks = Callable[[], Sequence[Mask | None]]
"""Waits for the masks of a step's draws. A mask is None if the draw has no grammar, or its grammar
cannot say what may come."""


class MaskThread:
    """Computes the masks of one runner."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def begin(self, draws: Sequence[Draw]) -> Masks:
        """Start to compute the masks of a step, one for all draws of a sequence. Until they are
        ready, nothing may change the tokens of its sequences."""
        wanted = dict.fromkeys(draw.grammar for draw in draws if draw.grammar is not None)
        if not wanted:
            return lambda: [None] * len(draws)
        computing = self._thread.submit(lambda: {grammar: _mask(grammar) for grammar in wanted})
        return lambda: [
            None if draw.grammar is None else computing.result()[draw.grammar] for draw in draws
        ]


def _mask(grammar: GrammarState) -> Mask | None:
    try:
        return grammar.mask()
    except GrammarFault:
        return None
