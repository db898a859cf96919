"""Decides how many drafts each row of a decode step gets: as many as raise the tokens per second.

A draft that is not accepted costs the time by which it lengthens the step, and the time in which it
was proposed. This cost is a moving average of measured steps, for each number of rows; the chance
that a draft is accepted is a moving average of its drafter.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from services.engine.speculation.average import Average

_LEAST_CHANCE = 0.05
"""A draft that is less likely is not tried, even where it costs nothing."""
_FIRST_COST, _FIRST_SHARE = 0.05, 0.5
"""The cost of a draft that was not measured yet, as a share of a step without drafts, and of what a
row of such a step takes if that is less: so a step of many rows tries drafts too."""
_WINDOW = 8
"""The number of steps in an average."""
_NUM_PLAIN, _PLAIN_EVERY = 3, 50
"""The number of steps without drafts before the first draft, and the number of steps with drafts
before the next step without any."""
_RETURN, _AGING = 0.002, 0.01
"""The shares by which each step without drafts moves the cost of a draft towards the first one and
lowers the weight of old measurements, which a busy machine may have spoiled."""
_MOST_LOSS, _LOSS_WINDOW = 0.01, 256
"""The share of the time that useless drafts may cost, on average over _LOSS_WINDOW steps."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """The cost of a step's drafts until its launch."""

    preparing_s: float = 0.0
    """The time to catch up with tokens of earlier steps."""
    proposing_s: float = 0.0
    launching_s: float = 0.0
    """The time, with the others, in which a device waited for the launch that computes beside the
    engine: a step that runs ahead of the step before does not wait."""
    catches_up: bool = False
    """Whether the step's duration includes the time in which the device caught up."""


@dataclass(slots=True)
class _StepCost:
    """The cost of decode steps of one number of rows."""

    first: float
    """The cost of a draft that was not measured yet."""
    plain_s: Average = field(default_factory=lambda: Average(0.0, _WINDOW, weight=0))
    """The duration of a step without drafts."""
    draft: Average = field(init=False)
    """The cost of a draft, as a share of `plain_s`."""
    most_drafts: int = 0
    """The most drafts of a step that was measured."""
    num_since_plain: int = 0

    def __post_init__(self) -> None:
        self.draft = Average(self.first, _WINDOW)

    @property
    def is_known(self) -> bool:
        """Whether steps without drafts were measured, and lately."""
        return self.plain_s.weight >= _NUM_PLAIN and self.num_since_plain < _PLAIN_EVERY

    def observe(self, num_drafts: int, duration_s: float) -> None:
        """A step counts as at most twice the average, since it may have been interrupted. A draft
        costs at most a step without drafts: a costlier draft is no more useless."""
        plain_s = self.plain_s
        if num_drafts:
            self.num_since_plain += 1
            self.most_drafts = max(self.most_drafts, num_drafts)
            cost = max(0.0, duration_s / plain_s.value - 1) / num_drafts
            self.draft.add(min(cost, 2 * max(self.draft.value, self.first), 1.0))
            return
        self.num_since_plain = 0
        plain_s.add(max(min(duration_s, 2 * plain_s.value or duration_s), 1e-9))
        self.draft.approach(self.first, _RETURN, _AGING)


class Payoff:
    """Chooses the numbers of drafts, and learns from the steps' durations."""

    def __init__(self) -> None:
        self._costs: dict[int, _StepCost] = {}
        self._saved = Average(0.25, _LOSS_WINDOW, weight=_LOSS_WINDOW)
        """The mean time that drafts save in a step, as a multiple of a step without drafts. The
        first value lets drafts cost the time of about 64 steps before they must pay."""

    @property
    def may_catch_up(self) -> bool:
        return self._saved.value > -_MOST_LOSS

    def numbers(self, chances: Seq[Seq[float]], num_rows: int) -> list[int]:
        """Return the number of drafts for each row of `chances`, in a step of `num_rows` rows.
        `chances[i][k]` is the chance that the first k + 1 drafts of row i are accepted. The
        likeliest drafts come first, until the next one would lower the tokens per second. A step
        gets at most twice as many as any before it, since a longer step may take very long."""
        step, numbers = self._cost(num_rows), [0] * len(chances)
        if not step.is_known:
            return numbers
        tokens, duration, cost = float(num_rows), 1.0, step.draft.value
        most = max(num_rows, 2 * step.most_drafts + 1)
        for unlikely, _, place in sorted(_likely(chances))[:most]:
            if -unlikely * duration <= cost * tokens:
                break
            tokens -= unlikely
            duration += cost
            numbers[place] += 1
        return numbers

    def measured(
        self,
        num_rows: int,
        num_drafts: int,
        num_accepted: int,
        duration_s: float,
        spent: Drafting,
    ) -> None:
        """Note the duration of a step of decoding rows, and the time that its drafts took."""
        step = self._cost(num_rows)
        spent_s = max(spent.launching_s, spent.preparing_s + spent.proposing_s)
        if not spent.catches_up:
            step.observe(num_drafts, duration_s - (spent.preparing_s if num_drafts else spent_s))
        is_longer = num_drafts > 0 or spent.catches_up
        saved = num_accepted / num_rows + is_longer
        paid_s = duration_s if is_longer else spent_s
        self._saved.add(saved - paid_s / max(step.plain_s.value, 1e-9))

    def _cost(self, num_rows: int) -> _StepCost:
        first = min(_FIRST_COST, _FIRST_SHARE / num_rows)
        return self._costs.setdefault(num_rows, _StepCost(first))


def _likely(chances: Seq[Seq[float]]) -> Iterable[tuple[float, int, int]]:
    """Yield (-chance, number in its row, row) of each draft that may pay. The likeliest draft sorts
    first; of equally likely drafts, the draft that needs the fewest drafts before it."""
    for place, row in enumerate(chances):
        for number, chance in enumerate(row):
            if chance < _LEAST_CHANCE:
                break
            yield -chance, number, place
