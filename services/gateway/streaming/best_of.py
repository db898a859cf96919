"""The output of a request with `best_of`: nothing until all sequences have ended, since only then
the best ones are known; then the best ones, each in one delta. See ADR 81."""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace

from services.gateway.frontend.api import Delta, Received
from services.gateway.streaming.logprob_text import PromptReporter
from services.gateway.streaming.output import Meter, Output, RequestStats
from services.gateway.streaming.pacer import StreamPacer
from services.gateway.streaming.sequence import Sequence
from services.protocol.logprobs import Logprobs
from services.protocol.ticket import FinishReason


class BestOf(Output):
    """Gives the client the `num_best` sequences with the highest mean logprob, numbered best first;
    of two equal ones the one with the lower index first.

    The length of the sequences bounds the memory that they take until then. There is no
    backpressure, since the client has nothing to read.
    """

    def __init__(
        self,
        request_id: str,
        stats: RequestStats,
        sequences: Seq[Sequence],
        meter: Meter,
        clock: Callable[[], float],
        prompt: PromptReporter | None = None,
        pacer: StreamPacer | None = None,
        *,
        num_best: int,
    ) -> None:
        super().__init__(request_id, stats, sequences, meter, clock, prompt, pacer)
        self._turns = deque()
        self._num_best = num_best
        self._places: dict[Sequence, int] = {}
        self._received: frozenset[int] = frozenset()

    def replay(self, received: Seq[Received]) -> None:
        """Note the sequences that the client has received, by their rank among the best. Each was
        sent whole, and is not sent again."""
        self._received = frozenset(told.index for told in received if told.finish_reason)

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

    def write(
        self,
        index: int,
        token_ids: tuple[int, ...],
        finish: FinishReason | None,
        logprobs: tuple[Logprobs, ...] = (),
        score: float | None = None,
    ) -> None:
        super().write(index, token_ids, finish, logprobs, score)
        if not self.living:
            self._choose()

    def _choose(self) -> None:
        likeliest_first = sorted(self.sequences, key=lambda one: -one.mean_logprob)
        best = likeliest_first[: self._num_best]
        self._places = {sequence: place for place, sequence in enumerate(best)}
        self._turns.extend(s for s, place in self._places.items() if place not in self._received)

    def _take(self, sequence: Sequence) -> Delta:
        delta = super()._take(sequence)
        return replace(delta, index=self._places[sequence], score=sequence.mean_logprob)
