"""Drafters whose proposals are right or wrong on purpose."""

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from services.engine.forward import known
from services.engine.sequences.sequence import Sequence
from services.engine.speculation.payoff import Payoff
from services.engine.speculation.speculation import Drafter, Speculation

Next = Callable[[Sequence, list[int]], int | None]
"""Returns the token after these tokens of a sequence, the last of which may be drafts; None:
unknown."""


class Oracle:
    """A drafter that knows the sequence's next tokens. One draft of `wrong_every` is wrong, chosen
    by a hash of its position; 0: none. The tokens after a wrong draft are those after the right
    one."""

    def __init__(self, next_token: Next, wrong_every: int = 0) -> None:
        self.runs_ahead = False
        self._next_token = next_token
        self._wrong_every = wrong_every

    def chances(self, sequence: Sequence, most: int) -> list[float]:
        return [1.0] * most

    def propose(
        self, asked: Mapping[Sequence, int], *, may_catch_up: bool
    ) -> tuple[dict[Sequence, tuple[int, ...]], float | None]:
        return {one: self._drafts(one, number) for one, number in asked.items()}, 0.0

    def _drafts(self, sequence: Sequence, number: int) -> tuple[int, ...]:
        tokens = list(sequence.tokens)
        drafts: list[int] = []
        while len(drafts) < number and (token := self._next_token(sequence, tokens)) is not None:
            tokens.append(token)
            is_wrong = self._is_wrong(sequence, len(tokens))
            drafts.append(abs(token - 1) if is_wrong else token)
        return tuple(drafts)

    def _is_wrong(self, sequence: Sequence, position: int) -> bool:
        return is_wrong(sequence.index, position, self._wrong_every)


def is_wrong(index: int, position: int, wrong_every: int) -> bool:
    chance = (position * 7919 + index * 104_729) % 1009
    return bool(wrong_every) and chance % wrong_every == 0


class SometimesWrong:
    """Proposes the drafts of another drafter, but makes one of `wrong_every` wrong, as `Oracle`
    does."""

    def __init__(self, drafter: Drafter, wrong_every: int) -> None:
        self._wrong_every = wrong_every
        self._drafter = drafter
        self.runs_ahead = False
        self.chances = drafter.chances

    def propose(
        self, asked: Mapping[Sequence, int], *, may_catch_up: bool
    ) -> tuple[dict[Sequence, tuple[int, ...]], float | None]:
        found, catch_up_s = self._drafter.propose(asked, may_catch_up=may_catch_up)
        return {one: self._changed(one, known(drafts)) for one, drafts in found.items()}, catch_up_s

    def _changed(self, sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(
            abs(draft - 1) if is_wrong(sequence.index, position, self._wrong_every) else draft
            for position, draft in enumerate(drafts, len(sequence.tokens) + 1)
        )


class AsMany(Payoff):
    """Allows as many drafts as possible, whether they pay or not."""

    def numbers(self, chances: Seq[Seq[float]]) -> list[int]:
        return [len(row) for row in chances]

    def measured(
        self,
        num_rows: int,
        num_drafts: int,
        num_accepted: int,
        duration_s: float,
        catch_up_s: float | None = 0.0,
    ) -> None:
        """Learn nothing."""


def oracle(next_token: Next, num_tokens: int = 4, wrong_every: int = 3) -> Speculation:
    """Speculation whose drafts are right, except one of `wrong_every`."""
    return Speculation(Oracle(next_token, wrong_every), num_tokens, AsMany())
