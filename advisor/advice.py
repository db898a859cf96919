"""Recommends a block size for a workload, with reasons.

Each block size leaves a share of the throughput of a machine that wastes nothing. The share is a
product of four parts, each measured or simulated:

    memory      slots that hold KV / reserved slots
    prefix      tokens that must be computed / tokens computed (the prefix cache finds whole blocks)
    attention   time of a decode step with the fastest block size / time with this block size
    store       time of a token / that time plus the block store's time for the token

The product is the share of requests per second that is left if memory limits how many requests run
at once and the other three parts determine how long each takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from advisor.workload import RecordedRequest

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)

TOLERANCE = 0.04
"""Products that differ by less than this count as equal: the product of blocks of 16 varied this
much between three runs on an otherwise idle machine (docs/benchmarks/memory.md)."""


@dataclass(frozen=True, slots=True)
class SizeCosts:
    """The costs of a workload with one block size.

    `utilization`, `tail`, `look_ahead`: shares of the reserved slots. `num_at_once`: mean number of
    running requests. `store_us_per_token`, `store_calls_per_token`: per generated token.
    `lost_tokens`: tokens of shared prefixes that are computed again, per request. `attention_us`:
    time of one layer.
    """

    block_size: int
    utilization: float
    tail: float
    look_ahead: float
    num_at_once: float
    num_preemptions: int
    blocks_per_request: float
    store_calls_per_token: float
    store_us_per_token: float
    lost_tokens: float
    prefix_efficiency: float
    attention_us: float


@dataclass(frozen=True, slots=True)
class StepTime:
    """A decode step with the fastest block size: the share of its time that attention takes, and
    the time per token."""

    attention_share: float
    token_us: float


@dataclass(frozen=True, slots=True)
class Shares:
    """The parts of the throughput that a block size leaves, each from 0 to 1."""

    memory: float
    prefix: float
    attention: float
    store: float

    @property
    def product(self) -> float:
        return self.memory * self.prefix * self.attention * self.store

    def difference_to(self, other: "Shares") -> str:
        """The relative difference to `other`, as text: each part that differs, and the product."""
        parts = ("memory", "prefix", "attention", "store")
        ratios = {part: getattr(self, part) / getattr(other, part) - 1 for part in parts}
        texts = [f"{part} {ratio:+.1%}" for part, ratio in ratios.items() if abs(ratio) >= 0.001]
        return f"{', '.join(texts) or 'no difference'}: {self.product / other.product - 1:+.1%}"


@dataclass(frozen=True, slots=True)
class Advice:
    """The recommended block size with reasons. `shares`: the parts of each block size."""

    block_size: int
    shares: Mapping[int, Shares]
    reasons: tuple[str, ...]


def advise(costs: Sequence[SizeCosts], step: StepTime) -> Advice:
    """Recommend the smallest of the block sizes whose product is within TOLERANCE of the largest:
    the advantages of small blocks are counted exactly, those of large blocks are timed."""
    fastest = min(cost.attention_us for cost in costs)
    shares = {cost.block_size: _shares(cost, fastest, step) for cost in costs}
    most = max(share.product for share in shares.values())
    good = [size for size, share in shares.items() if share.product >= most * (1 - TOLERANCE)]
    chosen = min(good)
    reasons = [f"{chosen} leaves {shares[chosen].product:.1%} of the machine"]
    for size in sorted(shares):
        if size in (chosen // 2, chosen * 2):
            reasons.append(f"{size} instead: {shares[size].difference_to(shares[chosen])}")
    best = max(shares, key=lambda size: shares[size].product)
    if best != chosen:
        reasons.append(
            f"{best} is ahead by {most / shares[chosen].product - 1:.1%}, which timings do not tell"
            " from nothing"
        )
    return Advice(chosen, shares, tuple(reasons))


def _shares(cost: SizeCosts, fastest_us: float, step: StepTime) -> Shares:
    slower = step.attention_share * (cost.attention_us / fastest_us - 1)
    return Shares(
        memory=cost.utilization,
        prefix=cost.prefix_efficiency,
        attention=1 / (1 + slower),
        store=step.token_us / (step.token_us + cost.store_us_per_token),
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


def prefix_costs(requests: Sequence[RecordedRequest], block_size: int) -> tuple[float, float]:
    """The costs of finding prefixes in whole blocks only: the mean number of shared tokens that a
    request computes again, and the share of all computed tokens that must be computed."""
    shared = shared_tokens(requests)
    lost = sum(num_tokens % block_size for num_tokens in shared)
    needed = sum(request.num_tokens for request in requests) - sum(shared)
    return lost / len(requests), needed / (needed + lost)
