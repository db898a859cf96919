"""The number of blocks that a sequence gets at its admission and during decode.

Workers use these rules, and `advisor` simulates them.
"""

WATERMARK = 0.01
"""The share of a pool that must stay free when a request is admitted, as in vLLM."""

LOOK_AHEAD = 8
"""The number of tokens for which a decoding sequence gets slots in advance."""


def blocks_at_admission(num_tokens: int, block_size: int) -> int:
    """Blocks for a sequence of `num_tokens` at its admission: room for all of them and one more."""
    return num_tokens // block_size + 1


def blocks_for_decode(num_tokens: int, look_ahead: int, max_len: int, block_size: int) -> int:
    """Blocks for a decoding sequence of `num_tokens`: room for `look_ahead` more tokens, but never
    for more than `max_len` tokens."""
    return -(-min(num_tokens + look_ahead, max_len) // block_size)
