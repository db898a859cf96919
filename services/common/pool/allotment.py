"""How many blocks a sequence is given, and when: what workers ask for, and what
`services.advisor` simulates of them."""

WATERMARK = 0.01
"""Share of a pool that must stay free when a request is admitted, as in vLLM."""

LOOK_AHEAD = 8
"""Tokens for which a decoding sequence has slots in advance."""


def blocks_to_begin(num_tokens: int, block_size: int) -> int:
    """At its admission: for all tokens that it has, and for one more."""
    return num_tokens // block_size + 1


def blocks_to_go_on(num_tokens: int, look_ahead: int, max_len: int, block_size: int) -> int:
    """While it decodes: so that `look_ahead` more tokens find their slots, but never more than the
    whole sequence of at most `max_len` needs."""
    return -(-min(num_tokens + look_ahead, max_len) // block_size)
