"""The ticket: everything that a worker needs to compute or continue a sequence group.

These dataclasses pass between the parts of a service; `services.protocol.codec` converts them to
protobuf messages and back.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from itertools import chain

from quire.sampling import NUMBERS, Beam, SamplingNumbers
from services.model.structured.structure import Structure

PRIORITIES = range(-128, 128)
MAX_BIAS = 100.0
"""The largest absolute value of a logit bias."""

MAX_SEQUENCES = 64
"""The most sequences of one request."""

_MAX_HEAD_START_MS = 60_000
_PRIORITY_BITS = 8


def head_start_ms(priority: int) -> int:
    """The ms by which a priority moves a request ahead of its arrival; negative above priority 0.

    Priorities -1 and 1 move a request by 30 s, and each further step by less: the total is always
    below 60 s. So whatever its priority, a later request goes before one of priority 0 only if it
    arrives within 60 s, and before any other only within 120 s.
    """
    return _MAX_HEAD_START_MS * -priority // (1 + abs(priority))


def queue_order(priority: int, arrival: int) -> int:
    """The queue position as one number: the order of service, preemption and growth, lowest first.

    It is the arrival in ms less the head start, then the priority. Requests with different arrivals
    have different orders. Orders are below 2**52, so that a double holds them exactly.
    """
    counts_from = arrival - head_start_ms(priority) + _MAX_HEAD_START_MS
    return (counts_from << _PRIORITY_BITS) + priority - PRIORITIES.start


def parts_of_order(order: int) -> tuple[int, int]:
    """The (priority, arrival) that `queue_order` made an order from."""
    counts_from, rest = divmod(order, 1 << _PRIORITY_BITS)
    priority = rest + PRIORITIES.start
    return priority, counts_from + head_start_ms(priority) - _MAX_HEAD_START_MS


_SUCCESSOR = "+"


def successor_holder_id(holder_id: str) -> str:
    """The holder id under which a request allocates again, if a block that it adopted has another
    content than its hash promised (law 6). It needs a new id because each id is used once."""
    return holder_id + _SUCCESSOR


def first_holder_id(holder_id: str) -> str:
    """The id that the gateway gave to this holder, or to the holder that it succeeds."""
    return holder_id.rstrip(_SUCCESSOR)


class FinishReason(Enum):
    """The reason why a sequence finished, by its value in the OpenAI API."""

    STOP = "stop"
    LENGTH = "length"


MAX_BEAM_WIDTH = 16
MAX_LENGTH_PENALTY = 4.0
"""The largest absolute value: no context length to that power overflows an fp32."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished result of a beam search: its generated tokens, up to the one that ended it, and
    its score."""

    token_ids: tuple[int, ...]
    score: float
    finish_reason: FinishReason


@dataclass(frozen=True, slots=True)
class BeamState:
    """The state of a beam search between two steps."""

    scores: tuple[float, ...]
    """The sum of logprobs of each living beam, best first; beam i is sequence i of the ticket."""
    finished: tuple[Hypothesis, ...] = ()
    """The best hypotheses so far, best first; at most as many as the search has beams."""


@dataclass(frozen=True, slots=True)
class TicketSequence:
    """One sequence of a ticket."""

    index: int
    token_ids: tuple[int, ...] = ()
    """The tokens generated so far, which are final."""
    block_ids: tuple[int, ...] = ()
    """The block table; without it the sequence is recomputed."""
    num_computed_tokens: int = 0
    """How many leading tokens of prompt + token_ids have KV in the blocks."""


@dataclass(frozen=True, slots=True)
class GroupState:
    """The part of a ticket that an engine changes."""

    sequences: tuple[TicketSequence, ...]
    """The sequences that have not ended, ascending by index."""
    beams: BeamState | None = None


@dataclass(frozen=True, slots=True)
class SamplingParams(SamplingNumbers[float, int]):
    """The sampling parameters of a request, with all defaults resolved. The order in which they
    apply is in services/engine/sampling/adjustment.py and sampler.py."""

    seed: int = 0
    max_tokens: int = 1
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = field(default=1, repr=False)
    """The number of sequences of the answer, 0 for an embedding; a search finds its `n` best.
    `Ticket.digest`, which is made of the other fields, is the same in services without this one."""
    beam: Beam | None = None
    """A beam search in place of sampling."""
    logprobs: int | None = None
    """How many of the likeliest tokens to report beside each token's logprob; None reports none."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """Pairs of token id and bias, ascending by id."""
    allowed_token_ids: tuple[int, ...] = ()
    """The tokens that may be drawn; empty allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that must not be generated."""
    structure: Structure | None = None
    """The form of the text; None allows any text."""

    def __post_init__(self) -> None:
        """Gives each number that is absent its neutral value."""
        for name, number in NUMBERS.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, number.neutral)

    @property
    def width(self) -> int:
        """The most sequences that run at the same time: those of the answer, or the beams."""
        return self.n if self.beam is None else self.beam.width

    def named_token_ids(self) -> Iterator[int]:
        """All token ids that any parameter names."""
        biased = (token_id for token_id, _ in self.logit_bias)
        return chain(self.stop_token_ids, biased, self.allowed_token_ids, *self.bad_words)

    def samples_like(self, other: "SamplingParams") -> bool:
        """Whether both choose the same tokens. Greedy parameters may differ in the seed."""
        seed = self.seed if self.temperature else other.seed
        return replace(self, seed=seed) == other


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter that a request uses, with the digest of its files."""

    name: str
    path: str
    """The directory from which every worker loads the adapter."""
    digest: str


@dataclass(frozen=True, slots=True)
class SwappedTable:
    """The block table of sequence `index` in a swap pool: KV of all its tokens but the last."""

    index: int
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Swapped:
    """The KV of a preempted request in the swap pool `pool_id`, under a detached holder."""

    pool_id: str
    holder_id: str
    holder_epoch: int
    tables: tuple[SwappedTable, ...]
    """A table for each sequence that the request had when it was swapped out, ascending by index.
    Tables share blocks of equal content."""

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The blocks of all tables, each once, in the order in which they first occur."""
        return tuple(dict.fromkeys(chain.from_iterable(one.block_ids for one in self.tables)))


@dataclass(frozen=True, slots=True)
class TicketState:
    """The part of a ticket that a worker changes, and answers with."""

    request_id: str
    attempt: int
    """The number under which the gateway sent the ticket out."""
    order: int
    """The queue position (`queue_order`)."""
    holder_id: str
    holder_epoch: int
    """Odd while a worker runs the holder, even while it is detached, 0 before the allocation."""
    sequences: tuple[TicketSequence, ...] = field(default=(TicketSequence(0),))
    """The sequences that have not ended, ascending by index. A prefill worker answers without any
    if all have ended there."""
    num_cached_tokens: int = 0
    swapped: Swapped | None = None
    """The KV that a prefill worker can copy instead of computing it."""
    prefill_ns_per_token: int = 0
    """The measured cost of computing a token of the prompt; 0 before the first measurement."""
    beams: BeamState | None = None
    """The state of a beam search that has begun."""

    @property
    def key(self) -> tuple[str, int]:
        """The request and the attempt, which every message about this ticket carries."""
        return self.request_id, self.attempt

    @property
    def is_detached(self) -> bool:
        """Whether the worker keeps blocks of the request, in its pool or swapped out."""
        return self.swapped is not None or any(one.block_ids for one in self.sequences)

    @property
    def state(self) -> "TicketState":
        """The state alone."""
        return TicketState(**{name: getattr(self, name) for name in STATE_FIELDS})

    def is_only(self, index: int) -> bool:
        """Whether the ticket has sequence `index` and no other."""
        return [sequence.index for sequence in self.sequences] == [index]


STATE_FIELDS = tuple(each.name for each in fields(TicketState))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket(TicketState):
    """Everything that a worker needs to compute or continue a request."""

    pool_id: str
    root_hash: bytes
    """The root of the chained prefix hashes, 16 bytes."""
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    timeout_ms: int = 0
    """The rest of the deadline; 0 if the request has none."""
    traceparent: str = ""
    """The trace context for the worker's spans; empty if the request is not traced."""
    adapter: Adapter | None = None

    def with_group(self, state: GroupState) -> "Ticket":
        """The ticket of a group that has left an engine."""
        return replace(self, sequences=state.sequences, beams=state.beams)

    def with_state(self, state: TicketState) -> "Ticket":
        return replace(self, **{name: getattr(state, name) for name in STATE_FIELDS})

    @property
    def digest(self) -> bytes:
        """Names what the client asked for, to gateways that do not know of each other. The tokens
        of a greedy request do not depend on its seed, which each gateway draws."""
        seed = self.sampling.seed if self.sampling.temperature else 0
        asked = self.root_hash, self.prompt_token_ids, replace(self.sampling, seed=seed)
        return hashlib.blake2b(repr(asked).encode(), digest_size=16).digest()

    @property
    def width(self) -> int:
        """How many sequences may run at a time. A beam search begins with one and may reach its
        width."""
        return len(self.sequences) if self.sampling.beam is None else self.sampling.width
