"""Adds drafts to the rows of a decode step, and learns from the tokens that were drawn."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import takewhile
from typing import Protocol

from services.engine.scheduler import ScheduledSequence
from services.engine.sequences.sequence import Sequence
from services.engine.speculation.ngram import Drafter
from services.engine.speculation.payoff import Payoff


class DraftNumbers(Protocol):
    """Decides how many drafts rows get; see `Payoff`."""

    def numbers(self, rows: Seq[tuple[Sequence, int]], num_rows: int) -> list[int]: ...

    def verified(self, sequence: Sequence, num_drafts: int, num_accepted: int) -> None: ...

    def measured(self, num_rows: int, num_drafts: int, duration_s: float) -> None: ...


class Speculation:
    """The speculation of one engine: at most `num_tokens` drafts a row and step."""

    def __init__(
        self, drafter: Drafter, num_tokens: int, numbers: DraftNumbers | None = None
    ) -> None:
        self.num_tokens = num_tokens
        self._drafter = drafter
        self._numbers = Payoff() if numbers is None else numbers

    def with_drafts(self, batch: list[ScheduledSequence], budget: int) -> list[ScheduledSequence]:
        """The batch with drafts for the rows for which they pay, if all rows decode. `budget`: how
        many tokens a step may compute."""
        if len(batch) >= budget or any(one.num_tokens > 1 for one in batch):
            return batch
        most = [min(one.sequence.num_draftable, self.num_tokens) for one in batch]
        places = [place for place, number in enumerate(most) if number > 0]
        numbers = self._numbers.numbers([(batch[i].sequence, most[i]) for i in places], len(batch))
        chosen = [(place, number) for place, number in zip(places, numbers, strict=True) if number]
        if not chosen:
            return batch
        proposed = self._drafter.propose([(batch[i].sequence, number) for i, number in chosen])
        batch, left = list(batch), budget - len(batch)
        for (place, _), drafts in zip(chosen, proposed, strict=True):
            is_end = batch[place].sequence.rules.end_ids.__contains__
            batch[place] = batch[place]._replace(drafts=_until(is_end, drafts[:left]))
            left -= len(batch[place].drafts)
        return batch

    def retired(
        self, batch: Seq[ScheduledSequence], num_accepted: Seq[int], duration_s: float
    ) -> None:
        """Learn from a retired step: how many drafts of each row were accepted."""
        if any(one.num_tokens > 1 for one in batch):
            return
        for one, number in zip(batch, num_accepted, strict=True):
            self._numbers.verified(one.sequence, len(one.drafts), number)
        num_drafts = sum(len(one.drafts) for one in batch)
        self._numbers.measured(len(batch), num_drafts, duration_s)


def _until(is_end: Callable[[int], bool], drafts: tuple[int, ...]) -> tuple[int, ...]:
    """The drafts before the first that would end the text."""
    return tuple(takewhile(lambda token: not is_end(token), drafts))
