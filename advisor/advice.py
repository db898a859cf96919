"""Recommends a block size for a recorded workload, with reasons.

Each block size leaves a share of the throughput of a machine that wastes nothing. The share is a
product of four parts, each timed or counted:

    memory      slots that hold KV / reserved slots
    prefix      tokens that must be computed / tokens computed (the prefix cache finds whole blocks)
    attention   time of a decode step with the fastest block size / time with this block size
    store       time of a token / that time plus the block store's time for the token

The product is the share of requests per second that is left if memory limits how many requests run
at once and the other three parts determine how long each takes.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from advisor.workload import RecordedRequest
from quire.errors import QuireError
from services.pool.allotment import LOOK_AHEAD, WATERMARK, blocks_at_admission, blocks_for_decode

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)

TOLERANCE = 0.04
"""Products that differ by less than this count as equal: the product of blocks of 16 varied this
much between three runs on an otherwise idle machine (docs/benchmarks/memory.md)."""

_CALL_US, _BLOCK_US = 150.0, 3.5
"""The store's time for a call, and for each block in it (docs/benchmarks/store-and-recovery.md)."""


@dataclass(frozen=True, slots=True)
class SizeCosts:
    """The costs of a workload with one block size, beside the costs of attention."""

    block_size: int
    utilization: float
    """The share of the reserved slots that holds KV, as `tail` and `look_ahead` are shares that
    hold none."""
    tail: float
    look_ahead: float
    num_at_once: float
    """The mean number of running requests, whose mean length is `mean_context`."""
    mean_context: float
    blocks_per_request: float
    store_calls_per_token: float
    """The store's calls for a generated token, which take `store_us_per_token`."""
    store_us_per_token: float
    lost_tokens: float
    """Tokens of shared prefixes that a request computes again."""
    prefix_efficiency: float
    """The share of all computed tokens that must be computed."""


def size_costs(
    asked: Sequence[RecordedRequest], num_slots: int, block_size: int, max_model_len: int
) -> SizeCosts:
    """Count the slots that each request holds in each of its steps, if the pool of `num_slots`
    token slots is as full as it can be without preemptions. Blocks of a shared prefix count for the
    first request that has it. A sequence may have `max_model_len` tokens, as far as its worker
    knows. Raises QuireError if a request can never get its slots."""
    num_blocks, num_requests = num_slots // block_size, len(asked)
    reserved = filled = tails = computed = num_steps = num_calls = num_growths = in_tables = 0
    needed = lost = 0
    for request, num_shared in zip(asked, shared_tokens(asked), strict=True):
        length = request.num_tokens
        if length > num_blocks * block_size:
            pool = f"a pool of {num_blocks} blocks of {block_size}"
            text = f"a request of {length} tokens never fits {pool}"
            raise QuireError(text, "does_not_fit")
        longest = max(length, min(max_model_len, num_blocks * block_size))
        shared = num_shared // block_size
        needed += length - num_shared
        lost += num_shared % block_size
        held = blocks_at_admission(request.num_prompt_tokens, block_size)
        for num_tokens in range(request.num_prompt_tokens, length):  # those that have KV
            if num_tokens > request.num_prompt_tokens:
                before = held
                held = max(held, blocks_for_decode(num_tokens, LOOK_AHEAD, longest, block_size))
                num_growths += held > before
            reserved += held - shared
            filled += num_tokens - shared * block_size
            tails += -num_tokens % block_size
            computed += num_tokens
        num_steps += request.num_generated_tokens
        in_tables += held
        # The allocation, the release, and commits of the prompt and of each block that is filled.
        num_full = request.num_prompt_tokens // block_size
        num_calls += 2 + (num_full > shared) + (length - 1) // block_size - num_full
    slots = reserved * block_size
    at_once = num_blocks * block_size * (1 - WATERMARK) * num_steps / slots
    at_once = max(1.0, min(num_requests, at_once))
    # All requests that grow in a step are in one call.
    extends = num_steps / at_once * (1 - (1 - num_growths / num_steps) ** at_once)
    calls = num_calls + extends
    # Each block is allocated, committed and released once.
    store_us = _CALL_US * calls + _BLOCK_US * 3 * in_tables
    return SizeCosts(
        block_size,
        utilization=filled / slots,
        tail=tails / slots,
        look_ahead=(slots - filled - tails) / slots,
        num_at_once=at_once,
        mean_context=computed / num_steps,
        blocks_per_request=in_tables / num_requests,
        store_calls_per_token=calls / num_steps,
        store_us_per_token=store_us / num_steps,
        lost_tokens=lost / num_requests,
        prefix_efficiency=needed / (needed + lost),
    )


def shared_tokens(requests: Sequence[RecordedRequest]) -> list[int]:
    """For each prompt, in order of arrival, the number of tokens that it shares with an earlier
    one. The last token of a prompt does not count, since it is always computed."""
    longest: dict[str, int] = {}
    shared = []
    for request in requests:
        here = longest.get(request.prefix, 0) if request.prefix else 0
        shared.append(min(here, request.num_shared_tokens, request.num_prompt_tokens - 1))
        if request.prefix:
            longest[request.prefix] = max(here, request.num_shared_tokens)
    return shared


@dataclass(frozen=True, slots=True)
class Advice:
    block_size: int
    shares: Mapping[int, Mapping[str, float]]
    """The parts of the throughput that each block size leaves, each from 0 to 1."""
    left: Mapping[int, float]
    """The product of the parts of each block size."""
    reasons: tuple[str, ...]


def advise(
    costs: Sequence[SizeCosts],
    attention_us: Mapping[int, float],
    attention_share: float,
    token_us: float,
) -> Advice:
    """Recommend the smallest of the block sizes whose product is within TOLERANCE of the largest:
    the advantages of small blocks are counted exactly, and the advantages of large blocks timed.

    `attention_us` is the time of attention in one layer, by block size, `attention_share` the share
    of attention in a decode step, and `token_us` the step's time for each of its tokens."""
    fastest = min(attention_us.values())
    shares = {
        cost.block_size: {
            "memory": cost.utilization,
            "prefix": cost.prefix_efficiency,
            "attention": 1 / (1 + attention_share * (attention_us[cost.block_size] / fastest - 1)),
            "store": token_us / (token_us + cost.store_us_per_token),
        }
        for cost in costs
    }
    left = {size: math.prod(parts.values()) for size, parts in shares.items()}
    best = max(left, key=left.__getitem__)
    chosen = min(size for size in left if left[size] >= left[best] * (1 - TOLERANCE))
    reasons = [f"{chosen} leaves {left[chosen]:.1%} of the machine"]
    reasons += [
        f"{size} instead: {_difference(shares[size], shares[chosen])}"
        for size in sorted({chosen // 2, chosen * 2} & left.keys())
    ]
    if best != chosen:
        reasons.append(
            f"{best} is ahead by {left[best] / left[chosen] - 1:.1%}, which timings do not tell"
            " from nothing"
        )
    return Advice(chosen, shares, left, tuple(reasons))


def _difference(one: Mapping[str, float], other: Mapping[str, float]) -> str:
    """The relative difference, as text: each part that differs, and the product."""
    ratios = {part: one[part] / other[part] - 1 for part in one}
    texts = [f"{part} {ratio:+.1%}" for part, ratio in ratios.items() if abs(ratio) >= 0.001]
    product = math.prod(one.values()) / math.prod(other.values()) - 1
    return f"{', '.join(texts) or 'no difference'}: {product:+.1%}"
