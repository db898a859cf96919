"""The state of penalties, biases and bans on a device: a row of tables for each sequence that has
any. A step sends what has changed since the sequence's last draw: few numbers, with the step's
other inputs.

The state is a function of the tokens alone (law 7); the host's `PenaltyState` decides it, and a
sequence that comes anew gets all of it. The draws behind drafts have rows of their own, for one
step.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kvops.draws import BANNED, NOT_ALLOWED, PenaltyTables
from services.engine.batch import Draw
from services.engine.device.inputs import Indices
from services.engine.sampling.adjustment import Adjustment, Ids, Values

_FIELDS = {"biases": np.float32, "counts": np.int32, "flags": np.int8}
_FIRST_SLOTS = 16


@dataclass(slots=True)
class _Sent:
    """The state of a sequence on the device."""

    slot: int
    seen: Ids = field(default_factory=lambda: np.zeros(0, np.int64))
    counts: Values = field(default_factory=lambda: np.zeros(0, np.float32))
    banned: Ids = field(default_factory=lambda: np.zeros(0, np.int64))


@dataclass(slots=True)
class _Changes:
    """The changes of one table: flat indices, each once, and new values."""

    places: list[Indices] = field(default_factory=list)
    values: list[Indices] = field(default_factory=list)

    def add(self, begin: int, token_ids: Indices, values: Indices) -> None:
        self.places.append(token_ids + begin)
        self.values.append(values)


class DevicePenalties:
    """The tables of one runner; they grow by doubling. A slot is free again when its sequence's
    `PenaltyState` is gone."""

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._tables: PenaltyTables | None = None
        self._sent: weakref.WeakKeyDictionary[object, _Sent] = weakref.WeakKeyDictionary()
        self._free: list[int] = []
        self._new: list[int] = []
        self._of_drafts: list[int] = []
        """The slots of the last step's draws behind drafts."""

    def update(self, draws: Sequence[Draw]) -> tuple[list[int], dict[str, Indices]]:
        """The slots of the draws, -1 without an adjustment; and arrays for `tables`."""
        self._free += self._of_drafts
        self._of_drafts.clear()
        changes = {name: _Changes() for name in _FIELDS}
        slots, states = dict[Adjustment | None, int]({None: -1}), set[int]()
        for adjustment in (draw.adjustment for draw in draws):
            if adjustment is None or adjustment in slots:
                continue
            is_first = id(adjustment.state) not in states
            states.add(id(adjustment.state))
            slots[adjustment] = self._change(adjustment, is_first, changes)
        arrays: dict[str, Indices] = {}
        if self._new:
            arrays["new_slots"] = np.array(self._new, np.int64)
            self._new.clear()
        for name, dtype in _FIELDS.items():
            if places := changes[name].places:
                arrays[f"{name}.places"] = np.concatenate(places)
                arrays[f"{name}.values"] = np.concatenate(changes[name].values).astype(dtype)
        return [slots[draw.adjustment] for draw in draws], arrays

    def tables(self, placed: Mapping[str, Tensor]) -> PenaltyTables:
        """The tables, with what `update` has changed, for the step that is launched next."""
        tables = self._tables
        assert tables is not None
        for name in _FIELDS:
            if "new_slots" in placed:
                getattr(tables, name).index_fill_(0, placed["new_slots"], 0)
            if f"{name}.places" in placed:
                getattr(tables, name).view(-1).index_copy_(
                    0, placed[f"{name}.places"], placed[f"{name}.values"]
                )
        return tables

    def _change(self, adjustment: Adjustment, is_first: bool, changes: dict[str, _Changes]) -> int:
        """Send what has changed since the sequence's last draw, or everything to a slot for this
        step if the adjustment is not the first one of its sequence. Returns the slot."""
        sent = self._sent.get(adjustment.state) if is_first else None
        is_new = sent is None
        if sent is None:
            sent = _Sent(self._take_slot())
            if is_first:
                self._sent[adjustment.state] = sent
                weakref.finalize(adjustment.state, self._free.append, sent.slot)
            else:
                self._of_drafts.append(sent.slot)
        begin = sent.slot * self._vocab_size
        if is_new:
            changes["biases"].add(begin, adjustment.biased, adjustment.biases)
        self._change_counts(adjustment, sent, begin, changes["counts"])
        self._change_flags(adjustment, sent, begin, changes["flags"], is_new)
        return sent.slot

    def _change_counts(
        self, adjustment: Adjustment, sent: _Sent, begin: int, counts: _Changes
    ) -> None:
        """Change the counts of tokens that the sequence has had since, and of those that a rejected
        draft had added."""
        num_kept = min(len(sent.seen), len(adjustment.seen))
        is_kept = sent.seen[:num_kept] == adjustment.seen[:num_kept]
        if len(sent.seen) > num_kept or not is_kept.all():
            gone = np.setdiff1d(sent.seen, adjustment.seen)
            counts.add(begin, gone, np.zeros(len(gone), np.float32))
        before = np.full(len(adjustment.counts), -1, np.float32)
        before[:num_kept] = np.where(is_kept, sent.counts[:num_kept], -1)
        changed = np.flatnonzero(before != adjustment.counts)
        counts.add(begin, adjustment.seen[changed], 1 + adjustment.counts[changed])
        sent.seen, sent.counts = adjustment.seen.copy(), adjustment.counts.copy()

    def _change_flags(
        self, adjustment: Adjustment, sent: _Sent, begin: int, flags: _Changes, is_new: bool
    ) -> None:
        """Change the flags of tokens whose ban begins or ends; for a new sequence also those of
        tokens that are not allowed."""
        banned = np.unique(adjustment.banned)
        if is_new and adjustment.allowed is not None:
            touched = np.arange(self._vocab_size)
        else:
            touched = np.setxor1d(banned, sent.banned)
        values = BANNED * np.isin(touched, banned)
        if adjustment.allowed is not None:
            values += NOT_ALLOWED * ~np.isin(touched, adjustment.allowed)
        flags.add(begin, touched, values)
        sent.banned = banned

    def _take_slot(self) -> int:
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._new.append(slot)
        return slot

    def _grow(self) -> None:
        tables = self._tables
        num_slots = len(tables.counts) if tables else 0
        more = num_slots or _FIRST_SLOTS
        shape, device = (more, self._vocab_size), self._device
        added = PenaltyTables(
            torch.zeros(shape, device=device),
            torch.zeros(shape, dtype=torch.int32, device=device),
            torch.zeros(shape, dtype=torch.int8, device=device),
        )
        if tables:
            added = PenaltyTables(
                *(torch.cat([getattr(tables, name), getattr(added, name)]) for name in _FIELDS)
            )
        self._tables = added
        self._free += range(num_slots + more - 1, num_slots - 1, -1)
