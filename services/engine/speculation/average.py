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
        """Move the average by `share` of its distance to `value`, because a speed that was measured
        long ago may have changed. The earlier values lose the share `aging` of their weight."""
        self.value += share * (value - self.value)
        self.weight *= 1 - aging
