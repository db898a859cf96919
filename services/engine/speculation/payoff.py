"""Decides how many drafts each row of a decode step gets: as many as raise the tokens per second.

A draft that is not accepted costs the time by which it lengthens the step, and the time in which it
was proposed. This cost is a moving average of measured steps, for each number of rows; how likely a
draft is accepted is a moving average of its drafter.
"""

from collections import defaultdict
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from services.engine.speculation.average import Average

_LEAST_CHANCE = 0.05
"""A draft that is less likely is not tried, even where it costs nothing."""
_FIRST_COST = 0.05
"""The cost of a draft that was not measured yet, as a share of a step without drafts."""
_WINDOW = 8
"""How many steps make an average."""
_NUM_PLAIN, _PLAIN_EVERY = 3, 50
"""So many steps without drafts come first; one is measured again after so many with drafts."""
_RETURN, _AGING = 0.002, 0.01
"""With each step without drafts, by which share of the distance the cost of a draft returns to
_FIRST_COST, and by which share the old measurements lose weight beside the next one: the machine
may have been busy."""
_MOST_LOSS, _LOSS_WINDOW = 0.01, 256
"""The share of the time that drafts may cost on average over so many steps, if they save none."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """The cost of a step's drafts before its launch."""

    preparing_s: float = 0.0
    """The time to catch up with tokens of earlier steps."""
    proposing_s: float = 0.0


@dataclass(slots=True)
class _StepCost:
    """The cost of decode steps of one number of rows."""

    plain_s: Average = field(default_factory=lambda: Average(0.0, _WINDOW, weight=0))
    """The duration of a step without drafts."""
    draft: Average = field(default_factory=lambda: Average(_FIRST_COST, _WINDOW))
    """The cost of a draft, as a share of `plain_s`."""
    most_drafts: int = 0
    """The most drafts of a step that was measured."""
    num_since_plain: int = 0

    @property
    def is_known(self) -> bool:
        """Whether steps without drafts were measured, and lately."""
        return self.plain_s.weight >= _NUM_PLAIN and self.num_since_plain < _PLAIN_EVERY

    def observe(self, num_drafts: int, duration_s: float) -> None:
        """No step counts as more than twice the average: it may have been interrupted. A draft that
        costs more than a step without drafts is as useless as one that costs as much."""
        plain_s = self.plain_s
        if num_drafts:
            self.num_since_plain += 1
            self.most_drafts = max(self.most_drafts, num_drafts)
            cost = max(0.0, duration_s / plain_s.value - 1) / num_drafts
            self.draft.add(min(cost, 2 * max(self.draft.value, _FIRST_COST), 1.0))
            return
        self.num_since_plain = 0
        plain_s.add(max(min(duration_s, 2 * plain_s.value or duration_s), 1e-9))
        self.draft.approach(_FIRST_COST, _RETURN, _AGING)


class Payoff:
    """Chooses the numbers of drafts, and learns from the steps' durations."""

    def __init__(self) -> None:
        self._costs: defaultdict[int, _StepCost] = defaultdict(_StepCost)
        self._saved = Average(0.25, _LOSS_WINDOW, weight=_LOSS_WINDOW)
        """The time that drafts save in a step, in steps without drafts. At first they may cost the
        time of some 64 steps, to show what they can do."""

    @property
    def may_catch_up(self) -> bool:
        return self._saved.value > -_MOST_LOSS

    def numbers(self, chances: Seq[Seq[float]], num_rows: int) -> list[int]:
        """The number of drafts for each row of a step of `num_rows` rows that may get some. The
        likeliest come first, until the next would lower the tokens by the step's duration; at most
        twice as many as were measured, since a longer step may take very long. `chances`: that a
        row's first draft is accepted, that the first two are, and so on."""
        step, numbers = self._costs[num_rows], [0] * len(chances)
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
        """Note the duration of a step of decoding rows, with what was spent on its drafts."""
        step = self._costs[num_rows]
        step.observe(num_drafts, duration_s - spent.preparing_s)
        saved = num_accepted / num_rows + bool(num_drafts)
        paid_s = duration_s if num_drafts else spent.preparing_s + spent.proposing_s
        self._saved.add(saved - paid_s / max(step.plain_s.value, 1e-9))


def _likely(chances: Seq[Seq[float]]) -> Iterable[tuple[float, int, int]]:
    """(-chance, its number, place of its row) of each draft that may pay: the likeliest is the
    smallest, and of equal ones the one that needs no deeper proposal."""
    for place, row in enumerate(chances):
        for number, chance in enumerate(row):
            if chance < _LEAST_CHANCE:
                break
            yield -chance, number, place
