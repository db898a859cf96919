"""The interface of a device to the engine: a step is launched, and its flight is retired later.

engine    launch 1   launch 2, retire 1   launch 3, retire 2      a device that computes beside
device    |---- step 1 ----|---- step 2 ----|---- step 3 ----|    the engine's thread

engine    launch 1 .......... retire 1, launch 2 .......... retire 2   a device whose `launch`
device    |---- step 1 ----|            |---- step 2 ----|             computes: the CPU
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from services.engine.batch import Fault, Row, RowOutput, RowResult, Wait


class Flight(Protocol):
    """A launched step."""

    @property
    def is_complete(self) -> bool:
        """Whether the device has computed the step, and all steps before it."""

    def result(self) -> Sequence[RowResult]:
        """Wait until the step is complete: its copies are made and its KV is in the arena. Return
        one result per row. May be called again."""


@dataclass(frozen=True, slots=True)
class PendingDrafts:
    """Drafts that a device draws before the step that verifies them; both are launched before the
    host knows the drafts."""

    sources: tuple[tuple[Flight, int], ...]
    """For each draft the flight that draws it, and its row there."""

    def __len__(self) -> int:
        return len(self.sources)

    def known(self) -> tuple[int, ...]:
        """Wait for the drafts. Behind a fault each is -1, which is no token."""
        found = list[int]()
        for flight, row in self.sources:
            result = flight.result()[row]
            if isinstance(result, Fault):
                return (*found, *[-1] * (len(self) - len(found)))
            found += result.tokens if isinstance(result, RowOutput) else result
        return tuple(found)


Drafts = tuple[int, ...] | PendingDrafts
"""The drafts of a row."""


def known(drafts: Drafts) -> tuple[int, ...]:
    return drafts.known() if isinstance(drafts, PendingDrafts) else drafts


class ForwardPass(Protocol):
    """The computation of steps: a runner, perhaps behind a fence guard or on shared CPUs."""

    def launch(self, rows: Sequence[Row], copies: Sequence[tuple[int, int]] = ()) -> Flight:
        """Launch a step: copy blocks within the arena, then compute the rows and store their KV.

        Steps are computed in the order of their launches. `copies` are pairs (source, target); all
        sources are read before any target is written. There may be copies without rows. Block
        tables and adjustments are read before `launch` returns.
        """

    def yield_device(self, wait: Wait) -> None:
        """Leave the device to other workers after a step; call `wait` to wait meanwhile."""

    def on_idle(self) -> None:
        """Called when there is nothing to compute until the next `launch`."""
