"""The sampling parameters that are numbers: the neutral value of each, and the values allowed.

The gateway checks what a client asks for with this table, and workers what a ticket says. See
"A new sampling parameter" in docs/development.md.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

MAX_PENALTY = 2.0
"""The largest absolute value of a presence or frequency penalty."""


@dataclass(frozen=True, slots=True)
class Number:
    """A sampling parameter that is a number."""

    neutral: float
    """The value that changes nothing."""
    accepts: Callable[[float], bool]
    """Whether a value is allowed; no parameter allows NaN."""
    bounds: str
    """The allowed values in words, for the end of an error message after "not"."""


def _is_penalty(value: float) -> bool:
    return -MAX_PENALTY <= value <= MAX_PENALTY


_ADDED = Number(0.0, _is_penalty, f"in [-{MAX_PENALTY:g}, {MAX_PENALTY:g}]")

NUMBERS = {
    "temperature": Number(1.0, lambda value: 0 <= value < math.inf, "0 or more"),
    "top_p": Number(1.0, lambda value: 0 < value <= 1, "in (0, 1]"),
    "min_p": Number(0.0, lambda value: 0 <= value <= 1, "in [0, 1]"),
    "repetition_penalty": Number(1.0, lambda value: 0 < value < math.inf, "above 0"),
    "presence_penalty": _ADDED,
    "frequency_penalty": _ADDED,
}
PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
