"""The limits of a worker."""

from dataclasses import dataclass

from services.pool.allotment import LOOK_AHEAD

PARK_WINDOW_S = 10.0
"""How long a decode worker parks requests whose gateway is gone: as long as the client library
looks for another gateway."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one worker.

    A step computes at most `max_num_batched_tokens` tokens, of at most `max_num_seqs` sequences.
    `look_ahead`: tokens for which a decoding sequence gets slots in advance. `ticket_ttl_s`: how
    long a detached ticket may stay unclaimed. `swapped_ttl_s`: the same for a ticket whose blocks
    are in the swap pool; it is longer because running requests do not need those blocks.
    `park_window_s`: how long a decode worker parks requests whose gateway is gone; 0: not at all.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    vocab_size: int = 1 << 31
    eos_token_ids: frozenset[int] = frozenset()
    look_ahead: int = LOOK_AHEAD
    ticket_ttl_s: float = 30.0
    swapped_ttl_s: float = 600.0
    park_window_s: float = 0.0
