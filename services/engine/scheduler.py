"""Which sequences run in the next step, and how many of their tokens."""

from collections.abc import Iterable

from services.engine.sequence import Sequence

Batch = list[tuple[Sequence, int]]
"""(sequence, how many of its uncomputed tokens)."""

_FIRST_COME_SHARE = 0.75
"""Part of the budget that goes strictly by order while more wants to run than fits. The rest goes
to whoever needs least, so that a long prompt does not hold short ones up."""


class Scheduler:
    """Chunks of at most `max_num_batched_tokens` tokens of at most `max_num_seqs` sequences a step.

    A decoding sequence is one that needs one token; nothing else tells prefill from decode.
    """

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self._budget = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._sequences: dict[str, Sequence] = {}

    def add(self, sequence: Sequence) -> None:
        self._sequences[sequence.key] = sequence
        self._sequences = dict(sorted(self._sequences.items(), key=lambda item: item[1].order))

    def remove(self, key: str) -> Sequence | None:
        return self._sequences.pop(key, None)

    def get(self, key: str) -> Sequence | None:
        return self._sequences.get(key)

    def next_batch(self) -> Batch:
        """First come, first served. Empty when nothing can run."""
        runnable = [seq for seq in self._sequences.values() if seq.num_runnable > 0]
        if sum(seq.num_runnable for seq in runnable) <= self._budget:
            return _fill(runnable[: self._max_num_seqs], self._budget)
        first_come = _fill(
            runnable[: self._max_num_seqs], max(1, int(self._budget * _FIRST_COME_SHARE))
        )
        left = self._budget - sum(num_tokens for _, num_tokens in first_come)
        others = sorted(runnable[len(first_come) :], key=lambda seq: seq.num_runnable)
        return first_come + _fill(others[: self._max_num_seqs - len(first_come)], left)


def _fill(sequences: Iterable[Sequence], budget: int) -> Batch:
    batch: Batch = []
    for sequence in sequences:
        if budget <= 0:
            break
        num_tokens = min(sequence.num_runnable, budget)
        batch.append((sequence, num_tokens))
        budget -= num_tokens
    return batch
