"""The scheduler: chooses the sequences of the next step and how many tokens of each to compute."""

from collections.abc import Iterable
from typing import NamedTuple

from services.engine.forward import Drafts
from services.engine.sequences.group import Group
from services.engine.sequences.sequence import Sequence


class ScheduledSequence(NamedTuple):
    """A sequence in a step, which computes its next `num_tokens` uncomputed tokens, and behind the
    last of them `drafts` (`services.engine.speculation`)."""

    group: Group
    sequence: Sequence
    num_tokens: int
    drafts: Drafts = ()

    @property
    def decodes(self) -> bool:
        """Whether this is the next token of a text, and not a prompt's last one for a worker that
        only prefills."""
        return self.num_tokens == 1 and not self.group.one_token


_SHORTEST_SHARE = 4
"""While more tokens wait than fit into a step, a quarter of the budget goes to the sequences that
need fewest tokens, so that a long prompt does not delay short ones. The rest is in queue order."""


class Scheduler:
    """Schedules at most `max_num_batched_tokens` tokens of at most `max_num_seqs` sequences a step.

    Little tells prefill from decode but the number of tokens: a decoding sequence needs one. If
    more tokens wait than fit into a step, decoding sequences come first, so that prompts beside
    them delay a token by the time of one full step at most.
    """

    def __init__(self, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self.budget = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self._groups: dict[str, Group] = {}

    def add(self, group: Group) -> None:
        self._groups[group.key] = group
        self._groups = dict(sorted(self._groups.items(), key=lambda item: item[1].order))

    def remove(self, key: str) -> None:
        self._groups.pop(key, None)

    def get(self, key: str) -> Group | None:
        return self._groups.get(key)

    def place_spares(self, look_ahead: int) -> list[tuple[Group, list[tuple[int, int]]]]:
        """Give spare blocks to the sequences of all groups. Returns the groups that need copies
        before they write, with the (source, target) pairs of blocks."""
        groups = [group for group in self._groups.values() if not group.is_paused]
        placed = [(group, group.place_spares(look_ahead)) for group in groups]
        return [(group, pairs) for group, pairs in placed if pairs]

    @property
    def num_uncomputed(self) -> int:
        """Uncomputed tokens of all started groups, whether they have slots or not."""
        return sum(group.num_uncomputed for group in self._groups.values() if group.is_started)

    @property
    def decodes(self) -> bool:
        """Whether a group is here that goes on after its first drawn tokens."""
        return any(not group.one_token for group in self._groups.values())

    def next_batch(self) -> list[ScheduledSequence]:
        """The next step: groups in queue order, sequences of a group by index; the first of those
        that decode and the first of the others always get tokens, if the step has room for two.
        Sequences of one adapter are neighbours, behind those without one. Empty if nothing can
        run."""
        return sorted(self._chosen(), key=_adapter)

    def _chosen(self) -> list[ScheduledSequence]:
        runnable = self._runnable()
        if sum(one.num_tokens for one in runnable) <= self.budget:
            return _fill(runnable[: self._max_num_seqs], self.budget)
        others = [one for one in runnable if not one.decodes]
        most = max(1, min(self._max_num_seqs, self.budget) - bool(others))
        decoding = [one for one in runnable if one.decodes][:most]
        num_seqs, budget = self._max_num_seqs - len(decoding), self.budget - len(decoding)
        shortest = sorted(others[1:], key=lambda one: one.num_tokens)
        shortest = shortest[: num_seqs // _SHORTEST_SHARE]
        early = _fill(shortest, budget // _SHORTEST_SHARE)
        taken = {one.sequence for one in early}
        left = budget - sum(one.num_tokens for one in early)
        in_order = [one for one in others if one.sequence not in taken]
        return decoding + _fill(in_order[: num_seqs - len(early)], left) + early

    def _runnable(self) -> list[ScheduledSequence]:
        return [
            ScheduledSequence(group, sequence, sequence.num_runnable)
            for group in self._groups.values()
            for sequence in group.runnable()
        ]


def _adapter(one: ScheduledSequence) -> str:
    adapter = one.sequence.rules.adapter
    return adapter.digest if adapter else ""


def _fill(sequences: Iterable[ScheduledSequence], budget: int) -> list[ScheduledSequence]:
    batch: list[ScheduledSequence] = []
    for one in sequences:
        if budget <= 0:
            break
        num_tokens = min(one.num_tokens, budget)
        batch.append(one._replace(num_tokens=num_tokens))
        budget -= num_tokens
    return batch
