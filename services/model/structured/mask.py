"""Masks of the tokens that a grammar allows next; they do not need the grammar library."""

import numpy as np

Mask = np.ndarray[tuple[int], np.dtype[np.int32]]
"""Bit i % 32 of word i // 32 says whether token i may come next."""


class GrammarFault(Exception):
    """The grammar cannot say which tokens may come: it is too complex at this place, or the text
    before does not follow it."""
