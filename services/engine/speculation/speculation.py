"""Adds drafts to the rows of a decode step, and learns from the tokens that were drawn."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import takewhile
from typing import Protocol

from services.engine.forward import Drafts, Flight, PendingDrafts
from services.engine.scheduler import ScheduledSequence
from services.engine.sequences.sequence import Sequence
from services.engine.speculation.payoff import Drafting, Payoff

Asked = tuple[Sequence, int]
"""A sequence, and how many drafts it may get at most. All of its tokens are known, unless the
drafter runs ahead."""


class Drafter(Protocol):
    """Proposes the next tokens of sequences, and learns from their tokens how often it is right."""

    @property
    def runs_ahead(self) -> bool:
        """Whether it proposes drafts behind tokens that only the device knows."""
        ...

    @property
    def catches_up(self) -> bool:
        """Whether the last `prepare` launched something for which it did not wait."""
        ...

    def chances(self, sequence: Sequence, most: int) -> Seq[float]:
        """How likely the first draft would be accepted, the first two, and so on, up to `most`;
        fewer: it has no more to propose. Asked before each step of the sequence."""
        ...

    def prepare(self, asked: Seq[Asked], *, may_catch_up: bool) -> list[int]:
        """Do a part of what has to be done once for each sequence, if `may_catch_up`. Returns how
        many drafts `propose` may be asked for in this step; 0: the sequence is not ready."""
        ...

    def propose(self, asked: Seq[Asked], behind: Flight | None = None) -> Seq[Drafts]:
        """Drafts for each (sequence, number): at most so many, none if there is nothing to propose.
        `prepare` has just returned these numbers. `behind` is the step in flight, which draws the
        last tokens of sequences that have unknown ones."""
        ...


class DraftNumbers(Protocol):
    """Decides how many drafts rows get; see `Payoff`."""

    @property
    def may_catch_up(self) -> bool: ...

    def numbers(self, chances: Seq[Seq[float]], num_rows: int) -> list[int]: ...

    def measured(
        self, num_rows: int, num_drafts: int, num_accepted: int, duration_s: float, spent: Drafting
    ) -> None: ...


class Speculation:
    """The speculation of one engine: at most `num_tokens` drafts a row and step, and `most_tokens`
    tokens of a step with drafts, as far as the step's own limit allows them.

    On a device that computes beside the engine a drafter may run ahead: then the device counts the
    accepted drafts, and the next step begins behind them. Other drafters have to see the tokens: a
    step with their drafts is launched when nothing is in flight. So is a step behind drafts of a
    sequence with penalties or a grammar, which depend on the tokens.

        runs ahead  | step, 3 drafts | step, 2 drafts | step, 3 drafts |      2 + 1 tokens, 2 + 1
        sees them   | step, 3 drafts |  host  | step, 2 drafts |  host  |     2 + 1 tokens, 2 + 1
        no drafts   |  step  |  step  |  step  |  step  |                     1 token each
    """

    def __init__(
        self,
        drafter: Drafter,
        num_tokens: int,
        numbers: DraftNumbers | None = None,
        most_tokens: int | None = None,
    ) -> None:
        self.num_tokens = num_tokens
        self._most_tokens = most_tokens
        self._drafter = drafter
        self._numbers = Payoff() if numbers is None else numbers

    def needs_tokens(self, batch: Seq[ScheduledSequence]) -> bool:
        """Whether the next step waits for the tokens of `batch`, the last step in flight: it has
        drafts, or drafts would pay behind its tokens, and the host has to see these."""
        if self._drafter.runs_ahead and not any(one.sequence.has_state for one in batch):
            return False
        if any(one.drafts for one in batch):
            return True
        next_rows = [
            one._replace(num_tokens=max(1, one.sequence.num_unlaunched))
            for one in batch
            if one.sequence in one.group.sequences
        ]
        return bool(next_rows and self._chosen(next_rows))

    def with_drafts(
        self, batch: list[ScheduledSequence], budget: int, behind: Flight | None = None
    ) -> tuple[list[ScheduledSequence], Drafting]:
        """The batch with drafts for the rows for which they pay, if all rows decode, and what it
        cost to get them. `budget` is the number of tokens that a step may compute. `behind` is the
        step in flight; None if there is none."""
        if behind is not None and not self._may_run_ahead(batch):
            return batch, Drafting()
        budget = min(budget, self._most_tokens or budget)
        chosen = self._chosen(batch) if len(batch) < budget else []
        if not chosen:
            return batch, Drafting()
        began = time.perf_counter()
        if self._drafter.runs_ahead:
            chosen = _within(chosen, budget - len(batch))
        asked = [(batch[i].sequence, number) for i, number in chosen]
        ready = self._drafter.prepare(asked, may_catch_up=self._numbers.may_catch_up)
        prepared = time.perf_counter()
        chosen = [(i, number) for (i, _), number in zip(chosen, ready, strict=True) if number]
        spent = Drafting(preparing_s=prepared - began, catches_up=self._drafter.catches_up)
        if not chosen:
            return batch, spent
        asked = [(batch[i].sequence, number) for i, number in chosen]
        proposed = self._drafter.propose(asked, behind)
        batch, left = list(batch), budget - len(batch)
        for (place, _), drafts in zip(chosen, proposed, strict=True):
            is_end = batch[place].sequence.rules.end_ids.__contains__
            if isinstance(drafts, PendingDrafts):
                drafts = PendingDrafts(drafts.sources[:left])
            else:
                drafts = _until(is_end, drafts[:left])
            batch[place] = batch[place]._replace(drafts=drafts)
            left -= len(batch[place].drafts)
        return batch, replace(spent, proposing_s=time.perf_counter() - prepared)

    def _may_run_ahead(self, batch: Seq[ScheduledSequence]) -> bool:
        """Whether a step behind the one in flight may have drafts."""
        depends = any(one.sequence.has_state and one.sequence.num_unknown for one in batch)
        return self._drafter.runs_ahead and not depends

    def _chosen(self, batch: Seq[ScheduledSequence]) -> list[tuple[int, int]]:
        """The places of the rows for which drafts pay, and how many; none if a row does not
        decode."""
        if not all(one.decodes for one in batch):
            return []
        most = [min(one.sequence.num_draftable, self.num_tokens) for one in batch]
        places = [place for place, number in enumerate(most) if number > 0]
        chances = [self._drafter.chances(batch[i].sequence, most[i]) for i in places]
        numbers = self._numbers.numbers(chances, len(batch))
        return [(place, number) for place, number in zip(places, numbers, strict=True) if number]

    def retired(
        self,
        batch: Seq[ScheduledSequence],
        num_accepted: Seq[int],
        duration_s: float,
        spent: Drafting,
    ) -> None:
        """Learn from a retired step of `duration_s`, with what was spent on drafts."""
        if not all(one.decodes for one in batch):
            return
        num_drafts = sum(len(one.drafts) for one in batch)
        self._numbers.measured(len(batch), num_drafts, sum(num_accepted), duration_s, spent)


def _within(chosen: Seq[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """The first of the drafts, `most` in all."""
    cut = list[tuple[int, int]]()
    for place, number in chosen:
        if most > 0:
            cut.append((place, min(number, most)))
        most -= number
    return cut


def _until(is_end: Callable[[int], bool], drafts: tuple[int, ...]) -> tuple[int, ...]:
    """The drafts before the first that would end the text."""
    return tuple(takewhile(lambda token: not is_end(token), drafts))
