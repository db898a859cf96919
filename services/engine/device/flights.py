"""The flight of a step: its outputs stay on the device, and copies travel to the host."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.engine.batch import RowResult
from services.engine.device.event import DeviceEvent, record_event
from services.engine.sampling.masks import Masks
from services.engine.sampling.sampling_batch import Outputs, SamplingBatch


class DrawnFlight:
    """A step whose outputs are on a device, or on the host after it computed at its launch."""

    def __init__(self, batch: SamplingBatch, outputs: Outputs, masks: Masks) -> None:
        self.batch, self._masks = batch, masks
        self._host = [[_on_host(tensor) for tensor in part] for part in outputs]
        self._event: DeviceEvent = record_event(outputs[0][0].device)
        self._results: Sequence[RowResult] | None = None

    @property
    def is_complete(self) -> bool:
        return self._event.query()

    def result(self) -> Sequence[RowResult]:
        if self._results is None:
            self._event.synchronize()
            self._results = self.batch.results(self._host, self._masks())
        return self._results


def _on_host(tensor: Tensor) -> Tensor:
    """A copy that the host may read once the device has passed the flight's event."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor, non_blocking=True)
