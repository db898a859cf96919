"""What crosses between a worker's asyncio loop and its engine thread."""

from dataclasses import dataclass

from blockstore.store import PrefixHash
from services.common.logprobs import Logprobs
from services.common.ticket import FinishReason
from services.engine.batch import Fault
from services.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Admit:
    """Run a sequence. `new_block_ids`: blocks that nobody has written since they were given out."""

    sequence: Sequence
    new_block_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Grow:
    key: str
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Remove:
    """Let go of a sequence after the step in flight; answered by `Removed` unless it has
    ended before."""

    key: str


Command = Admit | Grow | Remove


@dataclass(frozen=True, slots=True)
class Advance:
    """What one step did for one sequence. `completed`: blocks to commit. `wanted_blocks`: how many
    it should have in all by now, 0 if it has them. With a `finish` the engine has dropped it.
    `logprobs`: of the token, `prompt_logprobs`: of the prompt's next ones, where asked for."""

    key: str
    token: int | None
    finish: FinishReason | None
    num_computed: int
    completed: tuple[tuple[int, PrefixHash], ...]
    wanted_blocks: int
    logprobs: Logprobs | None = None
    prompt_logprobs: tuple[Logprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Removed:
    """No step touches the sequence's blocks any more. `token_ids`: prompt and generated.
    `block_ids`: its block table."""

    key: str
    token_ids: tuple[int, ...]
    block_ids: tuple[int, ...]
    num_computed: int


@dataclass(frozen=True, slots=True)
class Broken:
    """A sequence failed alone, and the engine has dropped it. `blocks`: all its full ones, its
    own and adopted, whose KV is not to be trusted any more."""

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
