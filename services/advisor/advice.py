"""Which block size a workload should have, and why.

Of a machine that wasted nothing, each block size leaves a share, and each part of it is one that
was measured or simulated:

    memory      slots that hold KV, of those that are reserved
    prefix      tokens that must be computed, of those that are: a prefix is found in whole blocks
    attention   a decode step with the fastest block size, of one with this
    store       a token's time, of that and its part of the block store's time

The product is what is compared. It says how many requests a second are left if memory decides how
many run at once, and all else how long they take.

See ADR 79.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.advisor.workload import Asked

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)

SAME = 0.04
"""What is less apart than timings of the same thing are: of three runs alone on a machine, in what
each left to blocks of 16 (docs/benchmarks/memory.md)."""


@dataclass(frozen=True, slots=True)
class SizeCosts:
    """What one block size costs a workload.

    `utilization`, `tail`, `look_ahead`: shares of the reserved slots. `num_at_once`: requests, on
    average. `store_us_per_token`, `store_calls_per_token`: of tokens generated. `lost_tokens`: of
    shared prefixes, a request. `attention_us`: of a layer.
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
    """Of a decode step with the fastest block size: how much of it is attention, and how long it
    takes for each of its tokens."""

    attention_share: float
    token_us: float


@dataclass(frozen=True, slots=True)
class Shares:
    """What a block size leaves."""

    memory: float
    prefix: float
    attention: float
    store: float

    @property
    def product(self) -> float:
        return self.memory * self.prefix * self.attention * self.store

    def beside(self, other: "Shares") -> str:
        """How this one differs: each part that does, and all together."""
        parts = ("memory", "prefix", "attention", "store")
        ratios = {part: getattr(self, part) / getattr(other, part) - 1 for part in parts}
        told = [f"{part} {ratio:+.1%}" for part, ratio in ratios.items() if abs(ratio) >= 0.001]
        return f"{', '.join(told) or 'no difference'}: {self.product / other.product - 1:+.1%}"


@dataclass(frozen=True, slots=True)
class Advice:
    """`shares`: by block size."""

    block_size: int
    shares: Mapping[int, Shares]
    reasons: tuple[str, ...]


def advise(costs: Sequence[SizeCosts], step: StepTime) -> Advice:
    """The block size that leaves most; of those about as good the smallest, since what speaks for
    small blocks is counted, and what speaks for large ones is timed."""
    fastest = min(cost.attention_us for cost in costs)
    shares = {cost.block_size: _shares(cost, fastest, step) for cost in costs}
    most = max(share.product for share in shares.values())
    good = [size for size, share in shares.items() if share.product >= most * (1 - SAME)]
    chosen = min(good)
    reasons = [f"{chosen} leaves {shares[chosen].product:.1%} of the machine"]
    for size in sorted(shares):
        if size in (chosen // 2, chosen * 2):
            reasons.append(f"{size} beside it: {shares[size].beside(shares[chosen])}")
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


def shared_tokens(asked: Sequence[Asked]) -> list[int]:
    """Of each prompt, in order of arrival, the tokens that an earlier one had too. Its last one is
    computed in any case."""
    longest: dict[str, int] = {}
    shared = []
    for request in asked:
        here = longest.get(request.prefix, 0) if request.prefix else 0
        shared.append(min(here, request.num_shared_tokens, request.num_prompt_tokens - 1))
        if request.prefix:
            longest[request.prefix] = max(here, request.num_shared_tokens)
    return shared


def prefix_costs(asked: Sequence[Asked], block_size: int) -> tuple[float, float]:
    """Tokens a request that were shared and are computed again, because a prefix is found in whole
    blocks only; and the share of all computed tokens that had to be."""
    shared = shared_tokens(asked)
    lost = sum(num_tokens % block_size for num_tokens in shared)
    needed = sum(request.num_tokens for request in asked) - sum(shared)
    return lost / len(asked), needed / (needed + lost)
