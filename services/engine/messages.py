"""What crosses between a worker's asyncio loop and its engine thread."""

from dataclasses import dataclass

from blockstore.records import PrefixHash
from services.engine.batch import Fault
from services.engine.sequences.group import Group, Token
from services.protocol.logprobs import Logprobs
from services.protocol.ticket import BeamState, Hypothesis, TicketSequence


@dataclass(frozen=True, slots=True)
class Admit:
    """Run a group, unless `is_started` from its `Start` on."""

    group: Group
    is_started: bool = True


@dataclass(frozen=True, slots=True)
class Start:
    """Run it; one that was removed before is no error."""

    key: str


@dataclass(frozen=True, slots=True)
class Grow:
    key: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class End:
    """Let go of one sequence of a group after the step in flight; with the last one the group is
    `Removed`. One that is not there is no error."""

    key: str
    index: int


@dataclass(frozen=True, slots=True)
class Remove:
    """Let go of a group after the step in flight; answered by `Removed` unless it has ended
    before."""

    key: str


Command = Admit | Start | Grow | End | Remove


@dataclass(frozen=True, slots=True)
class Advance:
    """What one step did for one group. `tokens`: drawn, one of a sequence at most. `completed`:
    blocks to commit; after that, `freed`: blocks to give back. `wanted_blocks`: how many it should
    have acquired in all by now, 0 if it has them. `left`: the engine has dropped it, and these
    sequences go on elsewhere; None: it runs on. `prompt_logprobs`: of the prompt's next tokens,
    where asked for. `beams`: where its search stands, if it is one, and at its end what it
    `found`."""

    key: str
    tokens: tuple[Token, ...]
    num_uncomputed: int
    completed: tuple[tuple[int, PrefixHash], ...]
    freed: tuple[int, ...]
    wanted_blocks: int
    left: tuple[TicketSequence, ...] | None
    prompt_logprobs: tuple[Logprobs, ...] = ()
    beams: BeamState | None = None
    found: tuple[Hypothesis, ...] = ()


@dataclass(frozen=True, slots=True)
class Removed:
    """No step touches the group's blocks any more. `sequences`: those that had not ended."""

    key: str
    sequences: tuple[TicketSequence, ...]
    beams: BeamState | None = None


@dataclass(frozen=True, slots=True)
class Broken:
    """A group failed alone, and the engine has dropped it. `blocks`: all its full ones, its own and
    adopted, whose KV is not to be trusted any more."""

    key: str
    fault: Fault
    blocks: tuple[tuple[int, PrefixHash], ...]


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """`num_tokens` were computed in `duration_s`."""

    advances: tuple[Advance, ...] = ()
    broken: tuple[Broken, ...] = ()
    removed: tuple[Removed, ...] = ()
    num_tokens: int = 0
    duration_s: float = 0.0

    @property
    def is_news(self) -> bool:
        """Whether anybody has to hear of it."""
        return bool(self.num_tokens or self.removed or self.advances)
