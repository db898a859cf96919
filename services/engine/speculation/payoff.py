"""Decides how many drafts each row of a decode step gets: as many as raise the tokens per second.

A draft that is not accepted costs the time by which it lengthens the step, its proposal included.
Moving averages of measured steps tell this cost, for each number of rows.
"""

from collections import defaultdict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from services.engine.speculation.average import Average

_EVERY = 64
"""Of so many steps of a number of rows, one has no drafts and another tries some, so that both
durations are known. In the long run drafts lose at most the time of one step in as many."""
_LEAST_CHANCE = 0.05
"""A draft that is less likely is not worth its place, even where the average says that it costs
nothing: a cost may be mistaken by the noise of a busy machine."""


@dataclass(slots=True)
class _Steps:
    """The decode steps of one number of rows."""

    num_steps: int = 0
    plain_s: Average = field(default_factory=Average)
    """The duration of a step without drafts."""
    drafted_s: Average = field(default_factory=Average)
    """The duration of a step with drafts."""
    num_drafts: Average = field(default_factory=Average)
    """The number of drafts of a step that has some."""
    most_drafts: int = 0

    @property
    def draft_cost(self) -> float:
        """The time that a draft adds to a step, as a share of a step without drafts; 0 until it is
        measured."""
        if not self.most_drafts:
            return 0.0
        return max(0.0, self.drafted_s.value / self.plain_s.value - 1) / self.num_drafts.value

    def observe(self, num_drafts: int, duration_s: float) -> None:
        """A step counts as at most half more than the averages tell, since it may have been
        interrupted, or be the first of its shape."""
        self.num_steps += 1
        expected_s = self.plain_s.value * (1 + self.draft_cost * num_drafts)
        duration_s = max(min(duration_s, 1.5 * expected_s or duration_s), 1e-9)
        if not num_drafts:
            self.plain_s.add(duration_s)
            if self.num_steps == 1:
                self.plain_s.weight = 0  # the first step of its shape may be slow: the next counts
            return
        if not self.most_drafts:
            self.drafted_s = Average(self.plain_s.value, 1)  # a step with 0 drafts
            self.num_drafts = Average(0.0, 1)
        self.drafted_s.add(duration_s)
        self.num_drafts.add(num_drafts)
        self.most_drafts = max(self.most_drafts, num_drafts)


class Payoff:
    """Chooses the numbers of drafts, and learns from the steps' durations."""

    def __init__(self) -> None:
        self._steps: defaultdict[int, _Steps] = defaultdict(_Steps)
        """The steps of each number of rows."""
        self._credit = float(_EVERY)
        """The time that drafts may lose, in steps without drafts. Time that drafts save is added to
        it, and time that they cost is taken from it. It never exceeds its first value, so that
        drafts that saved much in one text may not lose as much in the next."""

    @property
    def may_lose(self) -> bool:
        """Whether steps may try drafts that do not seem to pay, and a draft model may compute the
        tokens that it lacks."""
        return self._credit > 0

    def numbers(self, chances: Seq[Seq[float]]) -> list[int]:
        """Return the number of drafts for each row of a step. `chances[i][k]` is the chance that
        the first k + 1 drafts of row i are accepted. The likeliest drafts come first, until the
        next one would lower the tokens per second. A step gets at most twice as many as any before
        it, since a longer step may take very long."""
        num_rows = len(chances)
        steps, numbers = self._steps[num_rows], [0] * num_rows
        place_in_cycle = steps.num_steps % _EVERY
        if place_in_cycle == 0 or steps.num_steps < 2:
            return numbers
        likely = sorted(
            (-chance, number, row)
            for row, of_row in enumerate(chances)
            for number, chance in enumerate(of_row)
            if chance >= _LEAST_CHANCE
        )
        tokens, duration, cost = float(num_rows), 1.0, steps.draft_cost
        for unlikely, _, row in likely[: max(num_rows, 2 * steps.most_drafts + 1)]:
            if -unlikely * duration <= cost * tokens:
                break
            tokens -= unlikely
            duration += cost
            numbers[row] += 1
        if place_in_cycle == _EVERY // 2 and self.may_lose:
            return [
                number or min(1, len(of_row))
                for number, of_row in zip(numbers, chances, strict=True)
            ]
        return numbers

    def measured(
        self,
        num_rows: int,
        num_drafts: int,
        num_accepted: int,
        duration_s: float,
        catch_up_s: float | None = 0.0,
    ) -> None:
        """Note a step of decoding rows. Its duration includes `catch_up_s`, in which the draft
        model computed tokens that it lacked; None if nobody measured that time. This cost comes
        once, and tells nothing of the next step."""
        steps, gain = self._steps[num_rows], 1 / _EVERY
        if catch_up_s is not None:
            steps.observe(num_drafts, duration_s - catch_up_s)
        if (num_drafts or catch_up_s != 0.0) and steps.plain_s.value:
            gain += 1 + num_accepted / num_rows - duration_s / steps.plain_s.value
        self._credit = max(-_EVERY, min(self._credit + gain, _EVERY))
