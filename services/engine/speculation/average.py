"""A moving average."""

from dataclasses import dataclass


@dataclass(slots=True)
class Average:
    """The mean of the last values; older ones fade."""

    value: float
    """A guess at first, which counts as two values."""
    window: int
    """How many values count."""
    weight: float = 2

    def add(self, value: float) -> None:
        self.weight = min(self.weight + 1, self.window)
        self.value += (value - self.value) / self.weight

    def approach(self, value: float, share: float, aging: float = 0.0) -> None:
        """Go a `share` of the way to `value`: what was measured long ago may have changed. By the
        share `aging` the next value counts more."""
        self.value += share * (value - self.value)
        self.weight *= 1 - aging
