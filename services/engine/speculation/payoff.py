"""Decides how many drafts each row of a decode step gets: as many as raise the tokens per second.

A draft that is not accepted costs the time by which it lengthens the step. How long a step takes is
measured; how likely the next draft of a row is accepted follows from its last ones.

See ADR 160.
"""

from collections import defaultdict, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from statistics import median
from weakref import WeakKeyDictionary

from services.engine.sequences.sequence import Sequence

_FIRST_CHANCE = 0.5
_WEIGHT = 0.1
"""Of one verified draft in a row's chance."""
_REVIVAL = 0.001
"""By how much of the distance a chance returns to the first one with each step without drafts. So a
row whose drafts failed tries again now and then: in the long run that costs at most
_REVIVAL * _FIRST_CHANCE / _WEIGHT of the time, 0.5 %."""
_FIRST_GROWTH = 0.05
_NUM_FIRST = 3
"""As how many measurements the first growth counts: one interrupted step decides nothing."""
_NUM_PLAIN, _NUM_DRAFTED = 5, 9
_STEPS_BETWEEN_PLAIN = 50
_STEPS_BETWEEN_DRAFTED = 100
"""What was measured long ago is measured again, with one draft: the machine may have been busy."""


@dataclass(slots=True)
class _Durations:
    """Decode steps of one number of rows. `plain`: seconds of steps without drafts. `growth`: by
    which share of a plain step each draft lengthened others."""

    plain: deque[float]
    growth: deque[float]
    num_since_plain: int = 0
    num_since_drafted: int = 0


class StepCost:
    """The measured duration of decode steps, by their number of rows. Medians, since some steps are
    interrupted."""

    def __init__(self) -> None:
        self._by_rows: defaultdict[int, _Durations] = defaultdict(
            lambda: _Durations(
                deque(maxlen=_NUM_PLAIN),
                deque([_FIRST_GROWTH] * _NUM_FIRST, maxlen=_NUM_DRAFTED),
            )
        )

    def observe(self, num_rows: int, num_drafts: int, duration_s: float) -> None:
        known = self._by_rows[num_rows]
        if not num_drafts:
            known.plain.append(duration_s)
            known.num_since_plain = 0
            known.num_since_drafted += 1
        elif known.plain:
            grown = duration_s / max(median(known.plain), 1e-9) - 1
            known.growth.append(min(max(0.0, grown) / num_drafts, 1.0))
            known.num_since_plain += 1
            known.num_since_drafted = 0

    def growth(self, num_rows: int) -> float | None:
        """By which share of a plain step each draft lengthens a step of so many rows. None: a plain
        step has to be measured, for the first time or again."""
        known = self._by_rows[num_rows]
        if not known.plain or known.num_since_plain >= _STEPS_BETWEEN_PLAIN:
            return None
        return median(known.growth)

    def num_overdue(self, num_rows: int) -> int:
        """For how many steps the growth should have been measured: for the first times, or because
        it was not for long."""
        known = self._by_rows[num_rows]
        is_new = len(known.growth) < 2 * _NUM_FIRST
        return known.num_since_drafted + 1 - (not is_new) * _STEPS_BETWEEN_DRAFTED


class Payoff:
    """Chooses the numbers of drafts, and learns from what became of them."""

    def __init__(self) -> None:
        self._cost = StepCost()
        self._chances: WeakKeyDictionary[Sequence, float] = WeakKeyDictionary()

    def numbers(self, rows: Seq[tuple[Sequence, int]], num_rows: int) -> list[int]:
        """The number of drafts for each (sequence, most) of a step of `num_rows` rows.

        The likeliest drafts come first. One more pays while its chance is above the tokens that the
        step would lose by growing: growth * (tokens of the step) / (duration of the step).
        """
        growth = self._cost.growth(num_rows)
        numbers = [0] * len(rows)
        if growth is None or not rows:
            return numbers
        chances = [self._chances.get(sequence, _FIRST_CHANCE) for sequence, _ in rows]
        if (num_overdue := self._cost.num_overdue(num_rows)) > 0:
            numbers[num_overdue % len(rows)] = 1  # in turn: a row may have nothing to propose
            return numbers
        likeliest = [(-chance, place) for place, chance in enumerate(chances)]
        heapify(likeliest)
        num_tokens, duration = float(num_rows), 1.0
        while likeliest:
            gain, place = heappop(likeliest)
            if -gain * duration <= growth * num_tokens:
                break
            numbers[place] += 1
            num_tokens, duration = num_tokens - gain, duration + growth
            if numbers[place] < rows[place][1]:
                heappush(likeliest, (gain * chances[place], place))
        return numbers

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Note what became of the drafts of a row."""
        chance = self._chances.get(sequence, _FIRST_CHANCE)
        if not num_drafts:
            self._chances[sequence] = chance + _REVIVAL * (_FIRST_CHANCE - chance)
            return
        chance = 1 - (1 - chance) * (1 - _WEIGHT) ** num_accepted
        self._chances[sequence] = chance * (1 - _WEIGHT * (num_accepted < num_drafts))

    def measured(self, num_rows: int, num_drafts: int, duration_s: float) -> None:
        """Note the duration of a step of decoding rows."""
        self._cost.observe(num_rows, num_drafts, duration_s)
