"""The flights of steps: what a step has drawn stays on its device, and copies travel to the host.

Rows of the next step may take the drawn tokens on the device, before the host has them: behind
drafts, a row takes the token that was drawn after the last accepted one. The step that verifies
drafts may take the drafts from the flights of a draft model.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from services.engine.batch import Row, RowResult
from services.engine.device.event import DeviceEvent, record_event
from services.engine.device.inputs import Indices
from services.engine.sampling.masks import Masks
from services.engine.sampling.sampling_batch import Outputs, SamplingBatch


class DrawnFlight:
    """A step whose outputs are on a device. `drawn` are the tokens of its draws, and `accepted` the
    numbers of accepted drafts of its rows; None if no row has drafts."""

    def __init__(
        self, batch: SamplingBatch, outputs: Outputs, masks: Masks, accepted: Tensor | None = None
    ) -> None:
        self.batch, self._masks = batch, masks
        self.accepted = accepted
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


def taken_tokens(
    rows: Sequence[Row], ends: Indices, last: DrawnFlight | None
) -> tuple[DrawnFlight | None, dict[str, Indices]]:
    """The flight that draws tokens which the host does not know, and the arrays that `take` needs.
    The flight is the `last` one, or for rows of a draft model the target's step that they are
    behind."""
    flight, taken, by, back = last, list[int](), list[int](), list[int]()
    for row, end in zip(rows, ends.tolist(), strict=True):
        if row.drawn_by is not None:
            taken.append(end - len(row.token_ids))
            by.append(row.drawn_by)
            back.append(0)
        elif row.behind is not None:
            found, place = row.behind
            assert isinstance(found, DrawnFlight)
            flight, num_tokens = found, 1 if found.accepted is None else 2
            taken += range(end - num_tokens, end)
            by += [place] * num_tokens
            back += reversed(range(num_tokens))
    if not taken:
        return None, {}
    if flight is None:
        raise ValueError("a row takes a token of the last step, which is not on the device")
    return flight, {
        "taken": np.array(taken, np.int64),
        "taken_by": np.array(by, np.int64),
        "sources": flight.batch.first_draws(by),
        "back": np.array(back, np.int64),
    }


def take(placed: Mapping[str, Tensor], flight: DrawnFlight) -> None:
    """Writes the tokens that the flight has drawn into `placed`. A token that is further back than
    the number of accepted drafts is known, and stays. Behind a fault the token is any one, since
    the result is dropped."""
    taken, sources, tokens = placed["taken"], placed["sources"], placed["token_ids"]
    if flight.accepted is None:
        tokens.index_copy_(0, taken, flight.drawn[sources].clamp(min=0))
        return
    moved = flight.accepted[placed["taken_by"]] - placed["back"]
    drawn = flight.drawn[(sources + moved).clamp(min=0)].clamp(min=0)
    tokens.index_copy_(0, taken, torch.where(moved < 0, tokens[taken], drawn))


def moving(rows: Sequence[Row], last: DrawnFlight | None) -> Tensor | None:
    """The numbers of accepted drafts that move rows; None if no row is behind drafts."""
    row = next((row for row in rows if row.num_unknown), None)
    if row is None:
        return None
    flight = row.behind[0] if row.behind else last
    assert isinstance(flight, DrawnFlight)
    return flight.accepted


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
