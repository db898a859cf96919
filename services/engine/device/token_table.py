"""The token table of a device: the last tokens of each sequence that runs there. Each step writes
the tokens that it draws, so that the next steps read them before the host has them.

    position       | 7 | 8 | 9 | 10 | 11 |
    after step 1   | t | d1| g |  ? |        step 1 has the drafts d1 d2, and accepts d1: 1 accepted
    draft model    | t | d1| g | e1 | e2 |   draws the drafts of step 2 behind g
    step 2                 | g | e1 | e2 |   reads its tokens at the positions where they are

A target and its draft model have one table.
"""

import weakref
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from services.engine.batch import Owner, Row
from services.engine.device.inputs import Indices
from services.engine.sampling.sampling_batch import SamplingBatch

_WIDTH = 256
"""The number of last positions that the table keeps, more than two steps with the most drafts have:
2 * 65."""

_FIRST_ENTRIES = 64


class TokenTable:
    """A table that grows by doubling. An entry is free again when its sequence is gone. Entry 0
    belongs to no sequence: nobody reads the tokens that steps write there."""

    def __init__(self, device: torch.device) -> None:
        self._tokens = torch.zeros(1, _WIDTH, dtype=torch.int64, device=device)
        self._accepted = torch.zeros(1, dtype=torch.int64, device=device)
        self._entries: weakref.WeakKeyDictionary[Owner, int] = weakref.WeakKeyDictionary()
        self._free: list[int] = []

    def read_places(self, rows: Sequence[Row], ends: Indices) -> dict[str, Indices]:
        """The arrays that `read` needs; none if the host knows all tokens. `ends` are the ends of
        the rows in the tokens of the step. Raises ValueError if no step has drawn a token of a
        row's sequence."""
        tokens, entries = list[int](), list[int]()
        for row, end in zip(rows, ends.tolist(), strict=True):
            if row.num_on_device:
                tokens += range(end - row.num_on_device, end)
                entries += [self.entry_of(row)] * row.num_on_device
        if not tokens:
            return {}
        return {"read": np.array(tokens, np.int64), "read_entries": np.array(entries, np.int64)}

    def read(self, placed: Mapping[str, Tensor]) -> None:
        """Writes the tokens that the host does not know into `placed`, whose rows are moved."""
        if "read" in placed:
            places = placed["read"]
            positions = placed["positions"][places] % _WIDTH
            tokens = self._tokens[placed["read_entries"], positions]
            placed["token_ids"].index_copy_(0, places, tokens)

    def entry_of(self, row: Row) -> int:
        """Returns the entry of the row's sequence. Raises ValueError if no step has drawn a token
        of the sequence."""
        entry = None if row.owner is None else self._entries.get(row.owner)
        if entry is None:
            raise ValueError("a row takes a token that no step has drawn on the device")
        return entry

    def num_accepted(self, entries: Tensor) -> Tensor:
        """The number of drafts that the last step with drafts of each entry has accepted."""
        return self._accepted[entries]

    def draw_places(self, batch: SamplingBatch) -> dict[str, Indices]:
        """The arrays that `write` needs: the entries of the draws. The table writes
        the draws of several sequences after the same tokens to entry 0."""
        entries = list[int]()
        for row in batch.rows:
            is_alone = row.num_drafts > 0 or len(row.draws) == 1
            entries += [self._taken(row.owner) if is_alone else 0] * len(row.draws)
        return {"draw_entries": np.array(entries, np.int64)}

    def write(self, placed: Mapping[str, Tensor], positions: Tensor, drawn: Tensor) -> None:
        """Writes the tokens that a step has drawn, for these positions. A row with a fault writes
        any token, since its result is dropped."""
        self._tokens[placed["draw_entries"], positions % _WIDTH] = drawn.clamp(min=0)

    def write_accepted(self, placed: Mapping[str, Tensor], accepted: Tensor) -> None:
        """Writes the numbers of accepted drafts of all rows, and the rows' tokens before the
        drafts, which the next step of a draft model reads if none is accepted."""
        entries, bases = placed["row_entries"], placed["bases"]
        self._accepted[entries] = accepted
        self._tokens[entries, placed["positions"][bases] % _WIDTH] = placed["token_ids"][bases]

    def row_places(self, rows: Sequence[Row], ends: Indices) -> dict[str, Indices]:
        """The arrays that `write_accepted` needs."""
        entries = [self._taken(row.owner) if row.draws else 0 for row in rows]
        bases = ends - 1 - np.array([row.num_drafts for row in rows])
        return {"row_entries": np.array(entries, np.int64), "bases": bases.astype(np.int64)}

    def _taken(self, owner: Owner | None) -> int:
        """The sequence's entry, which it gets if it has none."""
        if owner is None:
            return 0
        entry = self._entries.get(owner)
        if entry is None:
            if not self._free:
                self._grow()
            entry = self._entries[owner] = self._free.pop()
            weakref.finalize(owner, self._free.append, entry).atexit = False
        return entry

    def _grow(self) -> None:
        num_entries = len(self._tokens)
        more = max(_FIRST_ENTRIES, num_entries)
        self._tokens = torch.cat([self._tokens, self._tokens.new_zeros(more, _WIDTH)])
        self._accepted = torch.cat([self._accepted, self._accepted.new_zeros(more)])
        self._free += range(num_entries + more - 1, num_entries - 1, -1)
