"""The limits of a worker."""

from dataclasses import dataclass, field

from services.engine.sequences.pooling import ScoreHead
from services.pool.allotment import LOOK_AHEAD

PARK_WINDOW_S = 10.0
"""How long a decode worker parks requests whose gateway is gone: as long as the client library
looks for another gateway."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one worker. A step computes at most `max_num_batched_tokens` tokens, of at most
    `max_num_seqs` sequences."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int = 1 << 31
    eos_token_ids: frozenset[int] = frozenset()
    look_ahead: int = LOOK_AHEAD
    """The number of tokens for which a decoding sequence gets slots in advance."""
    score_head: ScoreHead | None = field(default=None, compare=False)
    """The head of a cross-encoder; None for any other model."""
    ticket_ttl_s: float = 30.0
    """The time for which a detached ticket may stay unclaimed."""
    swapped_ttl_s: float = 600.0
    """The time for which a ticket with blocks in the swap pool may stay unclaimed. It is longer,
    because running requests do not need those blocks."""
    park_window_s: float = 0.0
    """The time for which a decode worker parks requests of a lost gateway; 0 parks none."""
