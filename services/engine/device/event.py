"""A point in a device's work: the device passes it when all earlier launches are done."""

from typing import Protocol

import torch


class DeviceEvent(Protocol):
    def query(self) -> bool:
        """Whether the device has passed it."""

    def synchronize(self) -> None:
        """Wait until the device has passed it."""


class PassedEvent:
    """The event of a device that computes at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


def record_event(device: torch.device) -> DeviceEvent:
    """Record an event behind everything that this thread has launched on the device."""
    if device.type != "cuda":
        return PassedEvent()
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
