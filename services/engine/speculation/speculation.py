"""Adds drafts to the rows of a decode step, and learns from the tokens that were drawn."""

from collections.abc import Container, Mapping
from collections.abc import Sequence as Seq
from itertools import takewhile
from typing import Protocol

from services.engine.forward import Drafts, PendingDrafts
from services.engine.scheduler import ScheduledSequence
from services.engine.sequences.sequence import Sequence
from services.engine.speculation.payoff import Payoff


class Drafter(Protocol):
    """Proposes the next tokens of sequences, and learns from their tokens how often it is right."""

    @property
    def runs_ahead(self) -> bool:
        """Whether it proposes drafts behind tokens that only the device knows."""
        ...

    def chances(self, sequence: Sequence, most: int) -> Seq[float]:
        """How likely the first draft would be accepted, the first two, and so on, up to `most`;
        fewer: it has no more to propose. Called before each step of the sequence: it learns from
        the tokens that came since."""
        ...

    def propose(
        self, asked: Mapping[Sequence, int], *, may_catch_up: bool
    ) -> tuple[Mapping[Sequence, Drafts], float | None]:
        """Drafts of the sequences in `asked` that have some, at most as many as it says for each.
        All of their tokens are known, unless the drafter runs ahead: then a step in flight draws
        the last ones. The second result is the time in seconds in which the drafter computed tokens
        that it lacked, as it must once for each sequence, if it `may_catch_up`; None if the device
        computes them later."""
        ...


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
        payoff: Payoff | None = None,
        most_tokens: int | None = None,
    ) -> None:
        self._drafter = drafter
        self._num_tokens = num_tokens
        self._payoff = Payoff() if payoff is None else payoff
        self._most_tokens = most_tokens

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
        return any(self._numbers(next_rows))

    def with_drafts(
        self, batch: list[ScheduledSequence], budget: int, *, runs_ahead: bool = False
    ) -> tuple[list[ScheduledSequence], float | None]:
        """The batch with drafts for the rows for which they pay, if all rows decode, and the time
        in which the drafter caught up with tokens. `budget` is the number of tokens that a step
        may compute. `runs_ahead` says that another step is in flight."""
        depends = any(one.sequence.has_state and one.sequence.num_unknown for one in batch)
        if runs_ahead and (depends or not self._drafter.runs_ahead):
            return batch, 0.0
        left = min(budget, self._most_tokens or budget) - len(batch)
        asked = dict[Sequence, int]()
        for one, number in zip(batch, self._numbers(batch), strict=True):
            if min(number, left) > 0:
                asked[one.sequence] = min(number, left)
                left -= number
        if not asked:
            return batch, 0.0
        found, catch_up_s = self._drafter.propose(asked, may_catch_up=self._payoff.may_lose)
        return [
            one._replace(drafts=_until_end(found.get(one.sequence, ()), one.sequence.rules.end_ids))
            for one in batch
        ], catch_up_s

    def retired(
        self,
        batch: Seq[ScheduledSequence],
        num_accepted: Seq[int],
        duration_s: float,
        idle_s: float,
        catch_up_s: float | None,
    ) -> None:
        """Learn from a retired step. The device waited for its launch during `idle_s` of its
        duration. That is a cost of drafts: steps without drafts run ahead, and do not wait. The
        drafter computed tokens that it lacked for `catch_up_s`; None if the device did."""
        if all(one.decodes for one in batch):
            num_drafts = sum(len(one.drafts) for one in batch)
            if not num_drafts and catch_up_s is not None:
                duration_s -= max(0.0, idle_s - catch_up_s)
            self._payoff.measured(len(batch), num_drafts, sum(num_accepted), duration_s, catch_up_s)

    def _numbers(self, batch: Seq[ScheduledSequence]) -> list[int]:
        """How many drafts pay for each row; none if a row does not decode."""
        if not all(one.decodes for one in batch):
            return [0 for _ in batch]
        chances = list[Seq[float]]()
        for one in batch:
            most = min(one.sequence.num_draftable, self._num_tokens)
            chances.append(self._drafter.chances(one.sequence, most) if most > 0 else ())
        return self._payoff.numbers(chances)


def _until_end(drafts: Drafts, end_ids: Container[int]) -> Drafts:
    """The drafts before the first that would end the text, where the host knows them."""
    if isinstance(drafts, PendingDrafts):
        return drafts
    return tuple(takewhile(lambda token: token not in end_ids, drafts))
