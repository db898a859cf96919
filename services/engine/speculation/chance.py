"""How likely the next draft is right, as far as the last ones tell."""

from dataclasses import dataclass

_FIRST_WEIGHT = 2


@dataclass(slots=True)
class Chance:
    """A mean over the last drafts. `value` is a guess at first, which counts as two drafts. `most`:
    how many drafts count at most; older ones fade."""

    value: float
    most: int
    weight: int = _FIRST_WEIGHT

    def learn(self, is_right: bool) -> None:
        self.weight = min(self.weight + 1, self.most)
        self.value += (is_right - self.value) / self.weight

    def revive(self, value: float, share: float) -> None:
        """Return a `share` of the way to `value`: the drafts were not tried again."""
        self.value += share * (value - self.value)
