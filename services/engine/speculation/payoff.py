"""Decides how many drafts each row of a decode step gets: as many as raise the tokens per second.

A draft that is not accepted costs the time by which it lengthens the step, and the time in which it
was proposed. How long these take is measured; how likely the next draft of a row is accepted
follows from its last ones.

See ADR 160 and ADR 177.
"""

from collections import defaultdict, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple
from weakref import WeakKeyDictionary

from services.engine.sequences.sequence import Sequence

_FIRST_CHANCE = 0.5
_WEIGHT, _WEIGHT_OF_ALL = 0.1, 0.05
"""Of one verified draft in a row's chance, and in that of all rows."""
_REVIVAL = 0.001
"""By how much of the distance a chance returns to the first one with each step without drafts. So a
row whose drafts failed tries again now and then: in the long run that costs at most
_REVIVAL * _FIRST_CHANCE / _WEIGHT of the time, 0.5 %."""
_FIRST_SHARE = 0.05
_NUM_FIRST = 3
"""Each share of a `Cost` at first, and as how many measurements it counts: one interrupted step
decides nothing, nor does the first draft alone, which costs more than the ones behind it."""
_NUM_PLAIN, _NUM_DRAFTED = 5, 9
_STEPS_BETWEEN_PLAIN = 50
_STEPS_BETWEEN_DRAFTED, _STEPS_BETWEEN_IF_SAVED = 100, 25
"""Old measurements are repeated, with one draft of each row: the machine may have
been busy. Sooner, if drafts have saved time before."""
_FIRST_CREDIT, _MOST_CREDIT = 64.0, 500.0
_INCOME = 0.005
"""In the time of plain steps: what catching up may cost at first, what it may have saved up at
most, and what each step adds."""


@dataclass(frozen=True, slots=True)
class Drafting:
    """The cost of a step's drafts before its launch. `preparing_s`: to catch up with tokens
    of earlier steps. `proposing_s`: to propose drafts, `depth` of them for a row."""

    depth: int = 0
    preparing_s: float = 0.0
    proposing_s: float = 0.0


class Cost(NamedTuple):
    """By which share of a plain step each draft lengthens a step, and which share it takes to
    propose the next draft of all rows."""

    growth: float
    depth: float


def _first_shares() -> deque[float]:
    return deque([_FIRST_SHARE] * _NUM_FIRST, maxlen=_NUM_DRAFTED)


@dataclass(slots=True)
class _Durations:
    """Decode steps of one number of rows. `plain`: seconds of steps without drafts. `growths`,
    `depths`: the shares of a `Cost`, as others had them."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_PLAIN))
    growths: deque[float] = field(default_factory=_first_shares)
    depths: deque[float] = field(default_factory=_first_shares)
    num_since_plain: int = 0
    num_since_drafted: int = 0

    @property
    def plain_s(self) -> float:
        return max(median(self.plain), 1e-9)


class StepCost:
    """The measured duration of decode steps, by their number of rows. Medians, since some steps are
    interrupted."""

    def __init__(self) -> None:
        self._by_rows: defaultdict[int, _Durations] = defaultdict(_Durations)

    def observe(self, num_rows: int, num_drafts: int, duration_s: float, spent: Drafting) -> None:
        """`duration_s`: without what was spent."""
        known = self._by_rows[num_rows]
        if not num_drafts:
            known.plain.append(duration_s)
            known.num_since_plain = 0
            known.num_since_drafted += 1
        elif known.plain:
            growth = max(0.0, duration_s / known.plain_s - 1) / num_drafts
            depth = spent.proposing_s / known.plain_s / max(spent.depth, 1)
            # A draft that costs more than a plain step is as useless as one that costs as much.
            known.growths.append(min(growth, 1.0))
            known.depths.append(min(depth, 1.0 - known.growths[-1]))
            known.num_since_plain += 1
            known.num_since_drafted = 0

    def plain_s(self, num_rows: int) -> float | None:
        known = self._by_rows[num_rows]
        return known.plain_s if known.plain else None

    def of(self, num_rows: int) -> Cost | None:
        """The cost of drafts in a step of so many rows. None: a plain step has to be measured, for
        the first time or again."""
        known = self._by_rows[num_rows]
        if not known.plain or known.num_since_plain >= _STEPS_BETWEEN_PLAIN:
            return None
        return Cost(median(known.growths), median(known.depths))

    def is_overdue(self, num_rows: int, num_steps: int) -> bool:
        """Whether the cost should be measured: for the first times, or because it was not for
        `num_steps`."""
        known = self._by_rows[num_rows]
        return len(known.growths) < 2 * _NUM_FIRST or known.num_since_drafted >= num_steps


class Payoff:
    """Chooses the numbers of drafts, and learns from what became of them.

    `_chance`: of the drafts of all rows, with which a row without drafts yet begins if it is above
    the first one.
    `_credit`: the time, in plain steps, that catching up may still cost. What drafts have saved is
    added to it, and what they have cost is subtracted.
    """

    def __init__(self) -> None:
        self._cost = StepCost()
        self._chances: WeakKeyDictionary[Sequence, float] = WeakKeyDictionary()
        self._chance = _FIRST_CHANCE
        self._credit = _FIRST_CREDIT

    @property
    def may_catch_up(self) -> bool:
        return self._credit > 0

    def numbers(self, rows: Seq[tuple[Sequence, int]], num_rows: int) -> list[int]:
        """The number of drafts for each (sequence, most) of a step of `num_rows` rows: those with
        the most tokens by the step's duration."""
        cost = self._cost.of(num_rows)
        numbers = [0] * len(rows)
        if cost is None or not rows:
            return numbers
        has_saved = self._credit > _FIRST_CREDIT
        num_steps = _STEPS_BETWEEN_IF_SAVED if has_saved else _STEPS_BETWEEN_DRAFTED
        if self._cost.is_overdue(num_rows, num_steps):
            return [1] * len(rows)
        first = max(self._chance, _FIRST_CHANCE)
        chances = [self._chances.get(sequence, first) for sequence, _ in rows]
        speed, faster = 0.0, float(num_rows)
        while faster > speed:
            speed = faster
            numbers, faster = _worthwhile(rows, chances, cost, speed, num_rows)
        return numbers

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Note what became of the drafts of a row."""
        chance = self._chances.get(sequence)
        if num_drafts:
            first = max(self._chance, _FIRST_CHANCE) if chance is None else chance
            self._chances[sequence] = _learned(first, _WEIGHT, num_drafts, num_accepted)
            self._chance = _learned(self._chance, _WEIGHT_OF_ALL, num_drafts, num_accepted)
        elif chance is not None:
            self._chances[sequence] = chance + _REVIVAL * (_FIRST_CHANCE - chance)

    def measured(
        self,
        num_rows: int,
        num_drafts: int,
        num_accepted: int,
        duration_s: float,
        spent: Drafting,
    ) -> None:
        """Note the duration of a step of decoding rows, with what was spent on its drafts."""
        step_s = duration_s - spent.preparing_s - spent.proposing_s
        self._cost.observe(num_rows, num_drafts, step_s, spent)
        if (plain_s := self._cost.plain_s(num_rows)) is None:
            return
        saved = _INCOME - (spent.preparing_s + spent.proposing_s) / plain_s
        if num_drafts:
            saved += 1 + num_accepted / num_rows - step_s / plain_s
        self._credit = min(self._credit + saved, _MOST_CREDIT)


def _learned(chance: float, weight: float, num_drafts: int, num_accepted: int) -> float:
    """The chance after so many accepted drafts, and a rejected one if not all were accepted."""
    chance = 1 - (1 - chance) * (1 - weight) ** num_accepted
    return chance * (1 - weight * (num_accepted < num_drafts))


def _worthwhile(
    rows: Seq[tuple[Sequence, int]], chances: Seq[float], cost: Cost, speed: float, num_rows: int
) -> tuple[list[int], float]:
    """The numbers of drafts that are worth their time where `speed` tokens are drawn in the time of
    a plain step, and the speed with these drafts.

    Draft j of a row is accepted with probability chance^j. One more draft of a row pays if this is
    above what the step draws in the time of its growth; the next draft of all rows, if what they
    gain together is above what the step draws in the time in which they are proposed.
    """
    numbers, gains = [0] * len(rows), list(chances)
    tokens, duration = float(num_rows), 1.0
    places = list(range(len(rows)))
    least = cost.growth * speed
    while places := [i for i in places if numbers[i] < rows[i][1] and gains[i] > least]:
        if sum(gains[i] - least for i in places) <= cost.depth * speed:
            break
        for i in places:
            numbers[i] += 1
            tokens += gains[i]
            gains[i] *= chances[i]
        duration += cost.depth + cost.growth * len(places)
    return numbers, tokens / duration
