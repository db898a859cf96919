"""Messages between a worker's event loop and its engine thread: commands in, outcomes out.

Groups are named by their key, the id of their holder. A command for a group that the engine does
not have is no error: the group may have ended meanwhile.
"""

from dataclasses import dataclass

from blockstore.records import PrefixHash
from services.engine.batch import Fault
from services.engine.sequences.group import Group
from services.engine.sequences.results import Advance
from services.protocol.ticket import GroupState


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
    the last one removes the group, which `Removed` reports. Beams cannot be ended."""

    key: str
    index: int


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a group once its steps in flight are retired. `Removed` is the answer if the engine
    still has it then."""

    key: str


Command = Admit | Start | AddBlocks | AbortSequence | Remove


@dataclass(frozen=True, slots=True)
class Removed:
    """A group that left the engine by `Remove` or `AbortSequence`: no step touches its blocks any
    more."""

    key: str
    state: GroupState


@dataclass(frozen=True, slots=True)
class FailedGroup:
    """A group that the engine dropped because one of its rows failed; the rest of the step
    counts."""

    key: str
    fault: Fault
    blocks: tuple[tuple[int, PrefixHash], ...]
    """(Block id, prefix hash) of all its full blocks, adopted ones too. Their KV may be the cause,
    so they must leave the prefix index."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """Everything that the engine reports at once."""

    advances: tuple[Advance, ...] = ()
    failed: tuple[FailedGroup, ...] = ()
    removed: tuple[Removed, ...] = ()
    num_tokens: int = 0
    """The number of tokens that the retired steps computed in `duration_s`."""
    duration_s: float = 0.0
    num_tokens_with_prompts: int = 0
    """The number of tokens that the retired steps with prompts computed in `with_prompts_s`."""
    with_prompts_s: float = 0.0
    is_busy: bool = False
    """Whether a step was launched or retired, so that the next one may have work."""

    @property
    def has_results(self) -> bool:
        """Whether the outcome has anything for the event loop."""
        return bool(self.num_tokens or self.removed or self.advances or self.failed)
