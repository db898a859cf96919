"""The results of steps for a sequence group: its tokens, finished blocks and end."""

from dataclasses import dataclass, field

from services.engine.sequences.sequence import CompletedBlock
from services.protocol.logprobs import Logprobs
from services.protocol.ticket import FinishReason, Hypothesis


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
class GroupResults:
    """The results of steps for a group. `freed`: blocks to give back to the pool. `embedding`: that
    of its prompt, once it is computed. `hypotheses`: the best ones of its beam search, when the
    search is over."""

    tokens: list[Token] = field(default_factory=list)
    prompt_logprobs: list[Logprobs] = field(default_factory=list)
    completed: list[CompletedBlock] = field(default_factory=list)
    freed: list[int] = field(default_factory=list)
    embedding: tuple[float, ...] = ()
    hypotheses: tuple[Hypothesis, ...] = ()
    verified: list[Verified] = field(default_factory=list)
