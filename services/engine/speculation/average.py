"""Moving averages of durations, and of the share of drafts that are accepted."""

from dataclasses import dataclass

_WINDOW = 16
"""The number of values in an average: few enough to follow a text and a machine that change, and
enough that three wrong drafts in a row do not end useful ones."""
_FIRST_ACCEPTANCE = 0.7
"""The share of drafts that are accepted before any was verified: high enough that some are tried
where they cost much."""


@dataclass(slots=True)
class Average:
    """The mean of the last values; older ones fade."""

    value: float = 0.0
    weight: int = 0
    """The number of values that `value` stands for."""

    def add(self, value: float) -> None:
        self.weight = min(self.weight + 1, _WINDOW)
        self.value += (value - self.value) / self.weight


def acceptance() -> Average:
    """The share of accepted drafts; the guess at first counts as two drafts."""
    return Average(_FIRST_ACCEPTANCE, 2)
