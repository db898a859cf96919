"""Decides how many drafts each row of a decode step gets: as many as raise the tokens per second.

A draft that is not accepted costs the time by which it lengthens the step, and the time in which it
was proposed. How long these take is measured; how likely a draft is accepted, its drafter knows.
"""

from collections import defaultdict, deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from statistics import fmean, median

_LEAST_CHANCE = 0.05
"""A draft that is less likely gets no thought: no step becomes faster by it."""
_LEAST_GAIN = 1.01
"""Steps with drafts have to be faster by this factor: chances and costs are estimates."""
_FIRST_SHARE = 0.05
_NUM_FIRST = 2
"""A share at first, and as how many measurements what was expected counts: one interrupted step
decides nothing."""
_NUM_PLAIN, _NUM_DRAFTED = 5, 9
_LEAST_PLAIN = 3
_STEPS_BETWEEN_PLAIN = 50
_STEPS_UNTIL_OLD, _STEPS_IF_SAVED = 150, 25
"""After so many steps without a measurement of drafts, the oldest of each kind is dropped: the
machine may have been busy. Sooner, if drafts have saved time before."""
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


@dataclass(slots=True)
class _Shares:
    """Measured shares of a plain step; `value`: their median."""

    measured: deque[float] = field(default_factory=lambda: deque(maxlen=_NUM_DRAFTED))
    value: float = 0.0

    def add(self, share: float, first: float) -> None:
        """`first`: what was expected, which counts as the first measurements."""
        if not self.measured:
            self.measured.extend([first] * _NUM_FIRST)
        self.measured.append(share)
        self.value = median(self.measured)

    def forget_oldest(self) -> None:
        if self.measured:
            self.measured.popleft()
            self.value = median(self.measured) if self.measured else _FIRST_SHARE


class StepCost:
    """The measured duration of decode steps of one number of rows, in plain steps: without drafts.
    Medians, since some steps are interrupted.

    A draft lengthens a step by a share that depends on how many there are: the first one changes
    the path of all rows, the next ones are nearly free, until arithmetic limits the step. So
    numbers of drafts are measured apart that have different numbers of binary digits.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=_NUM_PLAIN)
        self.plain_s: float | None = None
        self._growths: defaultdict[int, _Shares] = defaultdict(_Shares)
        self._depth = _Shares(value=_FIRST_SHARE)
        self._num_since_plain = 0
        self._num_since_drafted = 0

    def observe(self, num_drafts: int, duration_s: float, spent: Drafting, num_kept: int) -> None:
        """`duration_s`: without what was spent. `num_kept`: after how many plain steps old
        measurements are dropped."""
        if not num_drafts:
            self._plain.append(duration_s)
            self.plain_s = max(median(self._plain), 1e-9)
            self._num_since_plain = 0
            self._num_since_drafted += 1
            if self._num_since_drafted % num_kept == 0:
                for shares in (*self._growths.values(), self._depth):
                    shares.forget_oldest()
        elif self.plain_s is not None:
            growth = max(0.0, duration_s / self.plain_s - 1) / num_drafts
            depth = spent.proposing_s / self.plain_s / max(spent.depth, 1)
            # A draft that costs more than a plain step is as useless as one that costs as much.
            growth = min(growth, 1.0)
            kind = num_drafts.bit_length()
            self._growths[kind].add(growth, self._growth(kind))
            self._depth.add(min(depth, 1.0 - growth), self._depth.value)
            self._num_since_plain += 1
            self._num_since_drafted = 0

    @property
    def is_known(self) -> bool:
        """Whether plain steps were measured, and lately."""
        return len(self._plain) >= _LEAST_PLAIN and self._num_since_plain < _STEPS_BETWEEN_PLAIN

    @property
    def most_drafts(self) -> int:
        """Twice as many as were measured: a step of which nothing is known may be long."""
        kinds = [kind for kind, shares in self._growths.items() if shares.measured]
        return (2 << max(kinds, default=0)) - 1

    def duration(self, num_drafts: int, depth: int) -> float:
        kind = num_drafts.bit_length()
        return 1 + num_drafts * self._growth(kind) + depth * self._depth.value

    def _growth(self, kind: int) -> float:
        """The share of one draft. If it was not measured: the mean share of fewer drafts, which one
        measurement raises. Half of it, if that was a single one: the next may cost nothing."""
        if self._growths[kind].measured:
            return self._growths[kind].value
        fewer = [k for k, shares in self._growths.items() if k < kind and shares.measured]
        if not fewer:
            return _FIRST_SHARE
        nearest = max(fewer)
        share = fmean(self._growths[nearest].measured)
        return share / 2 if nearest == 1 else share


class Payoff:
    """Chooses the numbers of drafts, and learns from the steps' durations.

    `_credit`: the time, in plain steps, that catching up may still cost. What drafts have saved is
    added to it, and what they have cost is subtracted.
    """

    def __init__(self) -> None:
        self._costs: defaultdict[int, StepCost] = defaultdict(StepCost)
        self._credit = _FIRST_CREDIT

    @property
    def may_catch_up(self) -> bool:
        return self._credit > 0

    def numbers(self, chances: Seq[Seq[float]], num_rows: int) -> list[int]:
        """The number of drafts for each row of a step of `num_rows` rows that may get some: those
        with the most tokens by the step's duration. `chances`: that its first draft is accepted,
        that the first two are, and so on."""
        cost, numbers = self._costs[num_rows], [0] * len(chances)
        likeliest = sorted(_likely(chances))[: max(num_rows, cost.most_drafts)]
        if not likeliest or not cost.is_known:
            return numbers
        tokens, depth = float(num_rows), 0
        best, num_best = tokens * _LEAST_GAIN, 0
        for number, (unlikely, _, place) in enumerate(likeliest, 1):
            numbers[place] += 1
            tokens -= unlikely
            depth = max(depth, numbers[place])
            speed = tokens / cost.duration(number, depth)
            if speed > best:
                best, num_best = speed, number
        for _, _, place in likeliest[num_best:]:
            numbers[place] -= 1
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
        cost, step_s = self._costs[num_rows], duration_s - spent.preparing_s - spent.proposing_s
        has_saved = self._credit > 2 * _FIRST_CREDIT
        num_kept = _STEPS_IF_SAVED if has_saved else _STEPS_UNTIL_OLD
        cost.observe(num_drafts, step_s, spent, num_kept)
        if cost.plain_s is None:
            return
        saved = _INCOME - (spent.preparing_s + spent.proposing_s) / cost.plain_s
        if num_drafts:
            saved += 1 + num_accepted / num_rows - step_s / cost.plain_s
        self._credit = min(self._credit + saved, _MOST_CREDIT)


def _likely(chances: Seq[Seq[float]]) -> Iterable[tuple[float, int, int]]:
    """(-chance, its number, place of its row) of each draft that may pay: the likeliest is the
    smallest, and of equal ones the one that needs no deeper proposal."""
    for place, row in enumerate(chances):
        for number, chance in enumerate(row):
            if chance < _LEAST_CHANCE:
                break
            yield -chance, number, place
