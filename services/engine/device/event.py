"""A point in a device's work: what was launched before it is done when it has passed."""

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
    """An event behind all that was launched on this device by this thread."""
    if device.type != "cuda":
        return PassedEvent()
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event
