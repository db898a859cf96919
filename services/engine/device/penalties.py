"""The state of penalties, biases and bans on a device: a row of tables for each sequence that has
any. A step sends what has changed since the sequence's last draw: few numbers, with the step's
other inputs.

The state is a function of the tokens alone (law 7); the host's `PenaltyState` decides it, and a
sequence that comes anew gets all of it.
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
    counts: Values
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

    def update(self, draws: Sequence[Draw]) -> tuple[list[int], dict[str, Indices]]:
        """The slots of the draws, -1 without an adjustment; and arrays for `tables`."""
        adjustments = [draw.adjustment for draw in draws]
        changes = {name: _Changes() for name in _FIELDS}
        seen = {id(a.state): a for a in adjustments if a is not None}
        for adjustment in seen.values():
            self._change(adjustment, changes)
        arrays: dict[str, Indices] = {}
        for name, dtype in _FIELDS.items():
            if places := changes[name].places:
                arrays[f"{name}.places"] = np.concatenate(places)
                arrays[f"{name}.values"] = np.concatenate(changes[name].values).astype(dtype)
        return [-1 if a is None else self._sent[a.state].slot for a in adjustments], arrays

    def tables(self, placed: Mapping[str, Tensor]) -> PenaltyTables:
        """The tables, with what `update` has changed, for the step that is launched next."""
        tables = self._tables
        assert tables is not None
        for slot in self._new:
            for name in _FIELDS:
                getattr(tables, name)[slot].zero_()
        self._new.clear()
        for name in _FIELDS:
            if f"{name}.places" in placed:
                getattr(tables, name).view(-1).index_copy_(
                    0, placed[f"{name}.places"], placed[f"{name}.values"]
                )
        return tables

    def _change(self, adjustment: Adjustment, changes: dict[str, _Changes]) -> None:
        sent = self._sent.get(adjustment.state)
        is_new = sent is None
        if sent is None:
            sent = self._sent[adjustment.state] = _Sent(self._take_slot(), np.zeros(0, np.float32))
            weakref.finalize(adjustment.state, self._free.append, sent.slot)
        begin = sent.slot * self._vocab_size
        if is_new:
            changes["biases"].add(begin, adjustment.biased, adjustment.biases)
        before = np.full(len(adjustment.counts), -1, np.float32)
        before[: len(sent.counts)] = sent.counts
        changed = np.flatnonzero(before != adjustment.counts)
        changes["counts"].add(begin, adjustment.seen[changed], 1 + adjustment.counts[changed])
        sent.counts = adjustment.counts.copy()
        self._change_flags(adjustment, sent, begin, changes["flags"], is_new)

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
