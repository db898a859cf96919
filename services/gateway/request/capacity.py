"""Whether a request fits a pool."""

import math

from blockstore.records import PoolSpec


def capacity_problem(num_prompt: int, max_tokens: int, spec: PoolSpec, num_sequences: int) -> str:
    """Why a request can never fit a pool with this spec; "" if it can.

    The sequences of a request share the full blocks of its prompt.
    """
    num_shared = num_prompt // spec.block_size
    num_own = math.ceil((num_prompt + max_tokens) / spec.block_size) - num_shared
    num_blocks = num_shared + num_sequences * num_own
    if num_blocks <= spec.num_blocks:
        return ""
    times = f", {num_sequences} times," if num_sequences > 1 else ""
    return (
        f"its KV pool has room for {spec.num_blocks * spec.block_size} tokens: prompt "
        f"({num_prompt} tokens) and max_tokens ({max_tokens}){times} need {num_blocks} blocks of "
        f"{spec.block_size} tokens; the pool has {spec.num_blocks}"
    )
