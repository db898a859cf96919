"""Which sequences run in the next step, and how many of their tokens."""

from collections.abc import Iterable

from services.engine.sequence import Sequence

Batch = list[tuple[Sequence, int]]
"""(sequence, how many of its uncomputed tokens)."""

_SHORTEST_SHARE = 4
"""A quarter of the budget goes to whoever needs least while more wants to run than fits, so that a
long prompt does not hold short ones up; the rest goes strictly by order."""


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

    @property
    def num_runnable(self) -> int:
        return sum(seq.num_runnable > 0 for seq in self._sequences.values())

    def next_batch(self) -> Batch:
        """First come, first served. Empty when nothing can run."""
        runnable = [seq for seq in self._sequences.values() if seq.num_runnable > 0]
        if sum(seq.num_runnable for seq in runnable) <= self._budget:
            return _fill(runnable[: self._max_num_seqs], self._budget)
        shortest = sorted(runnable[1:], key=lambda seq: seq.num_runnable)
        shortest = shortest[: self._max_num_seqs // _SHORTEST_SHARE]
        early = _fill(shortest, self._budget // _SHORTEST_SHARE)
        keys = {seq.key for seq, _ in early}
        left = self._budget - sum(num_tokens for _, num_tokens in early)
        in_order = [seq for seq in runnable if seq.key not in keys]
        return _fill(in_order[: self._max_num_seqs - len(early)], left) + early


def _fill(sequences: Iterable[Sequence], budget: int) -> Batch:
    batch: Batch = []
    for sequence in sequences:
        if budget <= 0:
            break
        num_tokens = min(sequence.num_runnable, budget)
        batch.append((sequence, num_tokens))
        budget -= num_tokens
    return batch
