"""Ledgers by number, for the explorer: of equal ledgers, one is kept, audited and operated on.

Two ledgers are equal if no operation can distinguish them: if they differ only in the names of
their blocks (`canonical`), or in records for repeated calls that cannot come any more
(`Ledgers.settle`)."""

from collections.abc import Hashable
from typing import NamedTuple

from blockstore.errors import LedgerError
from blockstore.memory.ledger import Ledger
from blockstore.memory.recount import audit
from tests.model_checking.ledger_copies import copy_ledger, snapshot

Operation = tuple[str, tuple[Hashable, ...]]
"""A method of the ledger with its arguments."""

Renaming = tuple[int, ...]
"""New block ids by old ones."""


class Violation(Exception):
    """A law does not hold in a state, or for a step; the text says which and where."""


class Answer(NamedTuple):
    """The ledger's answer; `error`: a code of `blockstore.errors`, or empty."""

    error: str
    value: object


class Ledgers:
    """All ledgers reached so far. A new one whose audit finds something raises Violation."""

    def __init__(self, first: Ledger) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._ledgers: list[Ledger] = []
        self._outcomes: dict[tuple[int, Operation], tuple[int, Answer]] = {}
        self._settled: dict[tuple[int, frozenset[str]], tuple[int, Renaming]] = {}
        self.first = self._number(first)

    def __getitem__(self, number: int) -> Ledger:
        return self._ledgers[number]

    def __len__(self) -> int:
        return len(self._ledgers)

    def after(self, number: int, operation: Operation) -> tuple[int, Answer]:
        """The number of the ledger after `operation`, and its answer."""
        key = (number, operation)
        if key not in self._outcomes:
            ledger = copy_ledger(self._ledgers[number])
            name, arguments = operation
            try:
                answer = Answer("", getattr(ledger, name)(*arguments))
            except LedgerError as error:
                answer = Answer(error.code, None)
            self._outcomes[key] = (self._number(ledger), answer)
        return self._outcomes[key]

    def settle(self, number: int, again: frozenset[str]) -> tuple[int, Renaming]:
        """The number of the equal ledger that represents this one, and its names of the blocks.

        `again`: holders and workers with an operation that may come a second time. For all others
        the ledger drops what only answers repeated operations: tombstones, and how many blocks were
        cached.
        """
        key = (number, again)
        if key not in self._settled:
            ledger, renaming = canonical(self._ledgers[number])
            for tombstones in (ledger.released, ledger.reaped):
                for name in tombstones.epochs.keys() - again:
                    tombstones.forget(name)
            for holder in ledger.holders.values():
                if holder.holder_id not in again:
                    holder.num_cached_blocks, holder.runs = 0, ()
            self._settled[key] = (self._number(ledger), renaming)
        return self._settled[key]

    def _number(self, ledger: Ledger) -> int:
        key = snapshot(ledger)
        if key not in self._numbers:
            violations = audit(ledger).violations
            if violations:
                raise Violation("; ".join(violations))
            self._numbers[key] = len(self._ledgers)
            self._ledgers.append(ledger)
        return self._numbers[key]


def canonical(ledger: Ledger) -> tuple[Ledger, Renaming]:
    """The same ledger with renamed blocks: held ones first, in the order of acquisition, then
    cached ones, in the order of eviction, then free ones, in the order of allocation.

    Free blocks are then like blocks never used, as in a pool in which no block was ever freed.
    """
    twin = copy_ledger(ledger)
    blocks = twin.blocks
    used = [
        *(block for key in sorted(twin.holders) for block in twin.holders[key].acquired),
        *blocks.refs,
        *blocks.cached,
        *blocks.kept,
    ]
    free = [*reversed(blocks.returned), *range(blocks.next_unused, blocks.num_blocks)]
    names = {block: name for name, block in enumerate(dict.fromkeys([*used, *free]))}

    blocks.returned, blocks.next_unused = [], blocks.num_blocks - len(free)
    blocks.cached = {names[block]: None for block in blocks.cached}
    blocks.kept = {names[block]: None for block in blocks.kept}
    blocks.refs = {names[block]: count for block, count in blocks.refs.items()}
    blocks.payers = {names[block]: payer for block, payer in blocks.payers.items()}
    blocks.index = {prefix_hash: names[block] for prefix_hash, block in blocks.index.items()}
    blocks.hash_of = {names[block]: prefix_hash for block, prefix_hash in blocks.hash_of.items()}
    for holder in twin.holders.values():
        holder.acquired = [names[block] for block in holder.acquired]
        holder.held = {names[block] for block in holder.held}
    return twin, tuple(names[block] for block in range(blocks.num_blocks))
