"""The ticket: a sequence group at rest, and all that a worker needs to go on with it.

These are the domain's types; `services.protocol.codec` turns them into protobuf and back.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain

PRIORITIES = range(-128, 128)
MOST_PENALTY = 2.0
"""Of presence and frequency, either way."""
MOST_BIAS = 100.0

MAX_SEQUENCES = 64
"""Most sequences of one request."""

_MOST_HEAD_START_MS = 60_000
_PRIORITY_BITS = 8


def head_start_ms(priority: int) -> int:
    """How much older a request counts than it is; negative for a priority above 0.

    30 s for the first step away from 0, and less for each further one: together never 60 s. So
    only requests that arrive within 60 s can go before one of priority 0, and within 120 s before
    any other, whatever their priority.
    """
    return _MOST_HEAD_START_MS * -priority // (1 + abs(priority))


def queue_order(priority: int, arrival: int) -> int:
    """The one order of everything, lower first: arrival in ms less the head start, then priority.
    Different arrivals give different orders; below 2**52, so a double holds it."""
    counts_from = arrival - head_start_ms(priority) + _MOST_HEAD_START_MS
    return (counts_from << _PRIORITY_BITS) + priority - PRIORITIES.start


def parts_of_order(order: int) -> tuple[int, int]:
    """(priority, arrival) of a place in line."""
    counts_from, rest = divmod(order, 1 << _PRIORITY_BITS)
    priority = rest + PRIORITIES.start
    return priority, counts_from + head_start_ms(priority) - _MOST_HEAD_START_MS


_SUCCESSOR = "+"


def successor_of(holder_id: str) -> str:
    """A holder's id is used once: who has to allocate again, since a block that it adopted said
    something else (law 6), goes on under this one."""
    return holder_id + _SUCCESSOR


def first_of(holder_id: str) -> str:
    """The id that the gateway gave, of a holder or of any successor."""
    return holder_id.rstrip(_SUCCESSOR)


class FinishReason(Enum):
    """Values are those of the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


MAX_BEAM_WIDTH = 16
MAX_LENGTH_PENALTY = 4.0
"""Either way; the power of no context's length overflows an fp32."""


class EarlyStopping(Enum):
    """When a beam search that has `width` hypotheses ends; values are transformers'."""

    WHEN_FULL = "true"
    WHEN_UNLIKELY = "false"  # the best beam, ended here, would not be among them
    WHEN_IMPOSSIBLE = "never"  # the best beam, ended at the best of lengths, would not be


@dataclass(frozen=True, slots=True)
class BeamParams:
    """Beam search: `width` beams, of whose hypotheses the `num_returned` best are the answer. A
    hypothesis' score is its log-probability by its length to the power of `length_penalty`."""

    width: int
    num_returned: int
    length_penalty: float = 1.0
    early_stopping: EarlyStopping = EarlyStopping.WHEN_UNLIKELY


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """What a beam search has finished: the tokens, the one that ended it too, and its score."""

    token_ids: tuple[int, ...]
    score: float
    finish: FinishReason


@dataclass(frozen=True, slots=True)
class BeamState:
    """Where a beam search stands: `scores` of its living beams, sums of logprobs, best first; they
    are sequences 0, 1, ... of its ticket. `finished`: best first, as many as are kept."""

    scores: tuple[float, ...]
    finished: tuple[Hypothesis, ...] = ()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen, every default resolved. `temperature` 0 is greedy, `top_k` 0 keeps
    all. `logprobs`: tell each token's, and those of so many of the likeliest; None: tell none.

    `logit_bias`: (token id, what is added), by rising id. `allowed_token_ids`: empty means all.
    `bad_words`: token sequences that never come. `min_tokens`: so many come before any that ends
    the sequence. The order of it all stands in services/engine/sampling/sampler.py. `beam`: search
    instead.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    beam: BeamParams | None = None
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0

    def named_token_ids(self) -> Iterator[int]:
        """All that are named anywhere."""
        biased = (token_id for token_id, _ in self.logit_bias)
        return chain(self.stop_token_ids, biased, self.allowed_token_ids, *self.bad_words)

    def draws_like(self, other: "SamplingParams") -> bool:
        """Whether both choose the same tokens: greedy ones have no use for their seed."""
        seed = self.seed if self.temperature else other.seed
        return replace(self, seed=seed) == other


@dataclass(frozen=True, slots=True)
class TicketSequence:
    """`token_ids`: generated so far, final. `block_ids`: in sequence order; empty means recompute.
    `num_computed_tokens`: leading tokens of prompt + token_ids whose KV is in the blocks."""

    index: int
    token_ids: tuple[int, ...] = ()
    block_ids: tuple[int, ...] = ()
    num_computed_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SwappedTable:
    """The blocks of sequence `index`, in sequence order: KV of all its tokens but the last."""

    index: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Swapped:
    """KV of a ticket's sequences, at rest in the colder pool `pool_id`. `tables`: of all that were
    there when it was swapped out, ascending by index; equal contents are one block."""

    pool_id: str
    holder_id: str
    holder_epoch: int
    tables: tuple[SwappedTable, ...]

    @property
    def block_ids(self) -> tuple[int, ...]:
        """All of them, each once, as they come first."""
        return tuple(dict.fromkeys(chain.from_iterable(one.block_ids for one in self.tables)))


@dataclass(frozen=True, slots=True)
class Ticket:
    """`sequences`: those that have not ended, ascending by index; none, in the answer of a prefill
    worker with which all end. `holder_epoch` is odd while a worker runs the holder, even at rest, 0
    before its allocation. `root_hash`: 16 bytes, root of the chained prefix hashes. `timeout_ms`:
    what is left of the deadline, 0 for none. `swapped`: where a prefill worker gets KV from instead
    of computing it. `prefill_ns_per_token`: what that would cost, 0 while nobody has measured it.
    `beams`: of a beam search under way.
    """

    request_id: str
    attempt: int
    order: int
    pool_id: str
    holder_id: str
    holder_epoch: int
    root_hash: bytes
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    sequences: tuple[TicketSequence, ...] = field(default=(TicketSequence(0),))
    num_cached_tokens: int = 0
    timeout_ms: int = 0
    swapped: Swapped | None = None
    prefill_ns_per_token: int = 0
    beams: BeamState | None = None

    @property
    def key(self) -> tuple[str, int]:
        """(request, attempt): what every message about this ticket carries."""
        return self.request_id, self.attempt

    @property
    def width(self) -> int:
        """How many sequences run at a time: a search comes to all its beams."""
        beam = self.sampling.beam
        return len(self.sequences) if beam is None else beam.width

    def is_only(self, index: int) -> bool:
        """Whether this is its one sequence."""
        return [sequence.index for sequence in self.sequences] == [index]
