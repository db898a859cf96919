"""The flight of a step whose draws are all argmaxes: the device draws, and the host fetches later.

The tokens stay on the device, too: rows of the next step may take them before the host has them.
"""

from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from services.engine.batch import Answer, Fault, Query, Row, RowResult
from services.engine.device.event import DeviceEvent, record_event
from services.engine.sampling.logit_queries import row_results

_NOT_FINITE = -1


class GreedyFlight:
    """`drawn`: the token of each state, [states] int64, on the device; -1: it is not finite."""

    def __init__(self, rows: Sequence[Row], asked: Sequence[Query], drawn: Tensor) -> None:
        self.drawn = drawn
        self._rows = tuple(rows)
        self._asked = asked
        self._tokens = torch.empty(
            drawn.shape, dtype=torch.int64, pin_memory=drawn.device.type == "cuda"
        )
        self._tokens.copy_(drawn, non_blocking=True)
        self._event: DeviceEvent = record_event(drawn.device)

    @classmethod
    def of(cls, rows: Sequence[Row], asked: Sequence[Query], logits: Tensor) -> Self:
        """`logits`: fp32 [states, vocab_size]."""
        largest, tokens = logits.max(dim=-1)
        return cls(rows, asked, torch.where(largest.isfinite(), tokens, _NOT_FINITE))

    @property
    def is_complete(self) -> bool:
        return self._event.query()

    def result(self) -> Sequence[RowResult]:
        self._event.synchronize()
        tokens = self._tokens.tolist()
        drawn = [tokens[query.state] for query in self._asked]
        return row_results(
            self._rows,
            [Fault.NOT_FINITE if token == _NOT_FINITE else Answer(token) for token in drawn],
        )

    def inputs(self, rows: Sequence[int]) -> list[int]:
        """The states that these rows, by index, drew from: places in `drawn`."""
        states: dict[int, int] = {}
        for number, row in enumerate(self._rows):
            if row.draws:
                states[number] = len(states)
        return [states[row] for row in rows]


class CopyFlight:
    """The flight of copies without rows."""

    def __init__(self, device: torch.device) -> None:
        self._event = record_event(device)

    @property
    def is_complete(self) -> bool:
        return self._event.query()

    def result(self) -> Sequence[RowResult]:
        self._event.synchronize()
        return ()
