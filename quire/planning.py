"""Plans how many prefill and decode workers a load needs, for `quire plan` and the metric
`quire:recommended_workers`. Everything is measured by the workers."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

TTFT_S = 1.0
INTER_TOKEN_S = 0.1

_BUSY = 0.8
"""The share of a worker's time, or of its decode slots, that a plan uses."""
_FULL_BLOCKS = 0.9
"""A pool whose held blocks are a larger share begins to preempt."""
_SLACK = 0.2
"""A worker leaves only if this much less than one worker's work is left for it."""
_MAX_GROWTH = 2


class Figures(Protocol):
    """The load that a worker reports (`quire.reports.Worker`, `blockstore.registry.Load`)."""

    @property
    def num_running(self) -> float: ...
    @property
    def num_free_slots(self) -> float: ...
    @property
    def num_pending_tokens(self) -> float: ...
    @property
    def busy_permille(self) -> float: ...
    @property
    def step_us(self) -> float: ...
    @property
    def tokens_per_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class RolePlan:
    """The plan for one role."""

    num_workers: int
    """The workers that are there."""
    needed: float
    """The workers that the load keeps as busy as the targets say."""
    reason: str
    """The measure of the load that needs most workers, in a sentence."""

    @property
    def recommended(self) -> int:
        """At least 1, and at most twice the workers that are there: new workers change the load."""
        if self.needed > self.num_workers:
            return min(math.ceil(self.needed), _MAX_GROWTH * max(1, self.num_workers))
        return max(1, min(self.num_workers, math.ceil(self.needed + _SLACK)))


def plan_prefill(workers: Sequence[Figures], ttft_s: float = TTFT_S) -> RolePlan:
    """Plan for the serving prefill workers of one model."""
    busy = sum(worker.busy_permille for worker in workers) / 1000
    pending = sum(worker.num_pending_tokens for worker in workers)
    speeds = [worker.tokens_per_s for worker in workers if worker.tokens_per_s]
    backlog_s = pending * len(speeds) / sum(speeds) if speeds else 0.0
    share = busy / max(1, len(workers))
    needs = {
        f"workers computed {share:.0%} of the time (target {_BUSY:.0%})": busy / _BUSY,
        f"{pending:,.0f} prompt tokens waited, {backlog_s:.1f} s of one worker "
        f"(target {ttft_s:g} s)": backlog_s / ttft_s,
    }
    return _plan(workers, needs)


def plan_decode(
    workers: Sequence[Figures],
    inter_token_s: float = INTER_TOKEN_S,
    num_waiting: int = 0,
    held_share: float = 0.0,
) -> RolePlan:
    """Plan for the serving decode workers of one model. `num_waiting` requests have no worker yet.
    `held_share` is the share of held blocks in all blocks of the model's pools."""
    running = sum(worker.num_running for worker in workers)
    slots = running + sum(worker.num_free_slots for worker in workers)
    asked, num_workers = running + num_waiting, len(workers)
    step_ms = max((worker.step_us for worker in workers), default=0) / 1000
    within = min(slots, sum(_within(worker, inter_token_s) for worker in workers))
    needs = {
        f"requests asked for {asked:.1f} of {slots:.0f} slots (target {_BUSY:.0%})": (
            num_workers * asked / (slots * _BUSY) if slots else float(num_waiting > 0)
        ),
        f"a step took {step_ms:.0f} ms (target {1000 * inter_token_s:.0f} ms)": (
            num_workers * running / within if within < running else 0.0
        ),
        f"requests held {held_share:.0%} of the blocks (at most {_FULL_BLOCKS:.0%})": (
            num_workers * held_share / _FULL_BLOCKS
        ),
    }
    return _plan(workers, needs)


def divided(prefill: RolePlan, decode: RolePlan, total: int) -> tuple[int, int]:
    """Divide `total` workers in the ratio of the needs; at least one of each role."""
    need = prefill.needed + decode.needed
    num_prefill = round(total * prefill.needed / need) if need else total // 2
    num_prefill = max(1, min(total - 1, num_prefill))
    return num_prefill, total - num_prefill


def held_share(pools: Iterable[tuple[int, int]]) -> float:
    """The share of held blocks, from the numbers of held and of all blocks of each pool."""
    held, total = (sum(numbers) for numbers in zip((0, 0), *pools, strict=True))
    return held / total if total else 0.0


def _plan(workers: Sequence[Figures], needs: dict[str, float]) -> RolePlan:
    reason = max(needs, key=needs.__getitem__)
    return RolePlan(len(workers), needs[reason], reason)


def _within(worker: Figures, inter_token_s: float) -> float:
    """The sequences that a worker can run at this latency."""
    slots = worker.num_running + worker.num_free_slots
    if not worker.num_running or not worker.step_us:
        return slots
    return min(slots, worker.num_running * 1e6 * inter_token_s / worker.step_us)
