"""Messages between a worker's event loop and its engine thread: commands in, outcomes out.

Groups are named by their key, the id of their holder. A command for a group that the engine does
not have is no error: the group may have ended meanwhile.
"""

from dataclasses import dataclass
from typing import NamedTuple

from services.engine.sequences.group import Group
from services.engine.sequences.results import Advance


@dataclass(frozen=True, slots=True)
class Admit:
    """Add a group. It runs at once if `is_started`, else from its `Start` on."""

    group: Group
    is_started: bool = True


@dataclass(frozen=True, slots=True)
class Start:
    """Let an admitted group run."""

    key: str


@dataclass(frozen=True, slots=True)
class AddBlocks:
    """Give a group blocks that its holder has acquired."""

    key: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AbortSequence:
    """End one sequence of a group, if it is there, once its steps in flight are retired. The end of
    the last one removes the group, which its last `Advance` reports. Beams cannot be ended."""

    key: str
    index: int


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a group once its steps in flight are retired. An `Advance` with what remains is the
    answer if the engine still has it then."""

    key: str


Command = Admit | Start | AddBlocks | AbortSequence | Remove


class RetiredStep(NamedTuple):
    """A step that the device has computed."""

    num_tokens: int
    duration_s: float
    has_prompts: bool
    """Whether it computed tokens of prompts, and not only decoded."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Everything that the engine reports at once."""

    advances: tuple[Advance, ...] = ()
    retired: tuple[RetiredStep, ...] = ()
    """The retired steps with tokens."""
    is_busy: bool = False
    """Whether a step was launched or retired, so that the next one may have work."""

    @property
    def has_results(self) -> bool:
        """Whether the outcome has anything for the event loop."""
        return bool(self.retired or self.advances)
