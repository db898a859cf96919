"""The engine's report about a sequence group: its tokens, finished blocks and end."""

from dataclasses import dataclass, field

from blockstore.records import PrefixHash
from services.protocol.logprobs import LogprobColumns, Logprobs
from services.protocol.ticket import FinishReason, GroupState, Hypothesis


@dataclass(frozen=True, slots=True)
class Token:
    """A token that sequence `index` drew. `position` counts from the start of the prompt. `finish`
    is set if the sequence ends with it."""

    index: int
    position: int
    token: int
    finish: FinishReason | None
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Verified:
    """How many drafts of sequence `index` a step has verified, and how many of them it accepted."""

    index: int
    num_drafts: int
    num_accepted: int


@dataclass(slots=True)
class Advance:
    """The progress of one group in the retired step, or in two steps retired together. The group
    fills it, and the engine sends it to the event loop."""

    key: str
    tokens: list[Token] = field(default_factory=list)
    """At most one per sequence and step, and one more for each draft that was accepted."""
    verified: list[Verified] = field(default_factory=list)
    completed: list[tuple[int, PrefixHash]] = field(default_factory=list)
    """(block id, prefix hash) of blocks to commit."""
    freed: list[int] = field(default_factory=list)
    """Blocks to give back to the pool, once those are committed."""
    num_uncomputed: int = 0
    wanted_blocks: int = 0
    """How many blocks the holder should have acquired in total by now; 0 if it has enough."""
    remaining: GroupState | None = None
    """None while the group runs on. Otherwise the engine has dropped the group, and its sequences
    of this state, if any, continue at another worker."""
    prompt_logprobs: list[LogprobColumns] = field(default_factory=list)
    """The logprobs of the prompt's next tokens, chunk by chunk, if the request asks for them."""
    embedding: tuple[float, ...] = ()
    """The embedding of the prompt, once it is computed, if the request asks for it."""
    hypotheses: tuple[Hypothesis, ...] = ()
    """The best hypotheses of a beam search, in its last step."""
