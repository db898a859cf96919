"""The output of a request with `best_of`: the best sequences, each in one delta, once all sequences
have ended."""

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

from services.gateway.frontend.api import Delta, Received
from services.gateway.streaming.output import Output
from services.gateway.streaming.sequence import Sequence


class BestOf(Output):
    """Gives the client the `num_best` sequences with the highest mean logprob, numbered best first;
    of two equal ones the one with the lower index first.

    There is no backpressure, since the client has nothing to read before the end. The length of the
    sequences bounds their memory.
    """

    def __init__(self, *args: Any, num_best: int) -> None:
        """The arguments of `Output`, and `num_best`."""
        super().__init__(*args)
        self._read_order = deque()
        self._num_best = num_best
        self._ranks: dict[Sequence, int] = {}
        self._received: frozenset[int] = frozenset()

    def replay(self, received: Seq[Received]) -> None:
        """Note the sequences that the client has received, by their rank among the best. Each was
        sent whole, and is not sent again."""
        self._received = frozenset(each.index for each in received if each.finish_reason)

    def is_ahead_of(self, other: Output) -> bool:
        assert isinstance(other, BestOf)
        return not self._received <= other._received

    def catch_up(self, other: Output) -> None:
        """Take over the sequences of `other`: its client has read none of them, so all their tokens
        and logprobs are still there."""
        self.stats, self.sequences, self.living = other.stats, other.sequences, other.living
        self._num_unread, self._prompt_logprobs = other._num_unread, other._prompt_logprobs

    @property
    def _backlog(self) -> int:
        return 0

    def _drop_ended(self) -> None:
        """Also chooses the best sequences once all have ended."""
        super()._drop_ended()
        if not self.living:
            best_first = sorted(self.sequences, key=lambda sequence: -sequence.mean_logprob)
            ranked = list(enumerate(best_first[: self._num_best]))
            self._ranks = {sequence: rank for rank, sequence in ranked}
            self._read_order.extend(s for rank, s in ranked if rank not in self._received)

    def _take(self, sequence: Sequence) -> Delta:
        delta = super()._take(sequence)
        return replace(delta, index=self._ranks[sequence], score=sequence.mean_logprob)
