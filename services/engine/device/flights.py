"""The flights of a device: what a step has drawn stays there, and copies travel to the host.

Rows of the next step may take the drawn tokens on the device, before the host has them. The step
that verifies drafts may take these from the flights of a draft model.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.engine.batch import Row, RowResult
from services.engine.device.event import DeviceEvent, record_event
from services.engine.device.inputs import Indices
from services.engine.sampling.masks import Masks
from services.engine.sampling.sampling_batch import Outputs, SamplingBatch


class DrawnFlight:
    """A step whose outputs are on a device. `drawn` are the tokens of its draws."""

    def __init__(self, batch: SamplingBatch, outputs: Outputs, masks: Masks) -> None:
        self.batch, self._masks = batch, masks
        self.drawn = outputs[0][0]
        self._host = [[_on_host(tensor) for tensor in part] for part in outputs]
        self._event: DeviceEvent = record_event(self.drawn.device)
        self._results: Sequence[RowResult] | None = None

    @property
    def is_complete(self) -> bool:
        return self._event.query()

    def result(self) -> Sequence[RowResult]:
        if self._results is None:
            self._event.synchronize()
            self._results = self.batch.results(self._host, self._masks())
        return self._results


def drafted_tokens(
    rows: Sequence[Row], ends: Indices
) -> tuple[Sequence[DrawnFlight], dict[str, Indices]]:
    """The flights of a draft model that draw drafts which the host does not know. `drafted` has the
    indices of the step's tokens that are such drafts, and `draft_sources` their indices in the
    draws of all these flights."""
    flights, begins, num_draws = list[DrawnFlight](), dict[int, Indices](), 0
    drafted, sources = list[int](), list[int]()
    for row, end in zip(rows, ends.tolist(), strict=True):
        for place, (flight, number) in enumerate(row.drafted_by):
            assert isinstance(flight, DrawnFlight)
            if id(flight) not in begins:
                flights.append(flight)
                places = range(len(flight.batch.rows))
                begins[id(flight)] = num_draws + flight.batch.first_draws(places)
                num_draws += len(flight.drawn)
            drafted.append(end - len(row.drafted_by) + place)
            sources.append(int(begins[id(flight)][number]))
    if not flights:
        return (), {}
    return flights, {
        "drafted": np.array(drafted, np.int64),
        "draft_sources": np.array(sources, np.int64),
    }


def _on_host(tensor: Tensor) -> Tensor:
    """A copy that the host may read once the device has passed the flight's event."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
