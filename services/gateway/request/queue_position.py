"""Where a request stands in the order of service."""

from dataclasses import dataclass
from typing import Self

from services.protocol.ticket import parts_of_order, queue_order


@dataclass(frozen=True, slots=True)
class QueuePosition:
    """A request's priority, and its arrival by the registry's clock in ms."""

    priority: int
    arrival: int

    @classmethod
    def of(cls, order: int) -> Self:
        return cls(*parts_of_order(order))

    @property
    def order(self) -> int:
        return queue_order(self.priority, self.arrival)
