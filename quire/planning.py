"""Plans how many prefill and decode workers a load needs, for `quire plan` and the metric
`quire:recommended_workers`.

Everything is measured: how busy prefill workers are, and how long their pending prompt tokens take
at their speed; how many decode slots are in use, how many a worker can run within the target for
inter-token latency at its step time, and the share of blocks that is held.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

TTFT_S = 1.0
INTER_TOKEN_S = 0.1

FULL_BLOCKS = 0.9
"""A pool whose held blocks are a larger share begins to preempt."""
_SLACK = 0.2
"""A worker leaves only if this much less than one worker's work is left for it."""
_MAX_GROWTH = 2


@dataclass(frozen=True, slots=True)
class Targets:
    """What a plan has to reach."""

    ttft_s: float = TTFT_S
    inter_token_s: float = INTER_TOKEN_S
    busy: float = 0.8
    """The share of a worker's time, or of its decode slots, that the plan uses."""


class Figures(Protocol):
    """The load that a worker reports (`quire.types.Worker`, `blockstore.registry.Load`)."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_free_slots(self) -> int: ...
    @property
    def num_pending_tokens(self) -> int: ...
    @property
    def busy_permille(self) -> int: ...
    @property
    def step_us(self) -> int: ...
    @property
    def tokens_per_s(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Need:
    """One measure of the load, and the workers that it keeps as busy as the targets say."""

    num_workers: float
    text: str
    """A sentence with places for the figures."""
    figures: tuple[float, ...]

    @property
    def sentence(self) -> str:
        return self.text.format(*self.figures)


@dataclass(frozen=True, slots=True)
class RolePlan:
    """The plan for one role. The largest of its needs decides."""

    num_workers: int
    """The workers that are there."""
    needs: tuple[Need, ...]

    @property
    def needed(self) -> float:
        return self._largest.num_workers

    @property
    def reason(self) -> str:
        return self._largest.sentence

    @property
    def _largest(self) -> Need:
        return max(self.needs, key=lambda need: need.num_workers)

    @property
    def recommended(self) -> int:
        """At least 1, and at most twice the workers that are there: new workers change the load."""
        if self.needed > self.num_workers:
            return min(math.ceil(self.needed), _MAX_GROWTH * max(1, self.num_workers))
        return max(1, min(self.num_workers, math.ceil(self.needed + _SLACK)))


@dataclass(frozen=True, slots=True)
class Plan:
    prefill: RolePlan
    decode: RolePlan

    def divided(self, total: int) -> tuple[int, int]:
        """Divide `total` workers in the ratio of the needs; at least one of each role."""
        need = self.prefill.needed + self.decode.needed
        share = self.prefill.needed / need if need else 0.5
        num_prefill = max(1, min(total - 1, round(total * share)))
        return num_prefill, total - num_prefill


def plan(
    prefill: Sequence[Figures],
    decode: Sequence[Figures],
    targets: Targets,
    num_waiting: int = 0,
    held_share: float = 0.0,
) -> Plan:
    """Plan for the serving workers of one model. `num_waiting` counts the requests that no worker
    has yet; `held_share` is the share of held blocks in the model's pools."""
    return Plan(
        RolePlan(len(prefill), _prefill_needs(prefill, targets)),
        RolePlan(len(decode), _decode_needs(decode, targets, num_waiting, held_share)),
    )


def mean(plans: Sequence[Plan]) -> Plan:
    """The plan for the last plan's workers, with each need and its figures on average over all
    plans."""
    return Plan(
        _mean_role([each.prefill for each in plans]), _mean_role([each.decode for each in plans])
    )


def _mean_role(plans: Sequence[RolePlan]) -> RolePlan:
    by_measure = zip(*(each.needs for each in plans), strict=True)
    return RolePlan(plans[-1].num_workers, tuple(map(_mean_need, by_measure)))


def _mean_need(needs: Sequence[Need]) -> Need:
    figures = zip(*(each.figures for each in needs), strict=True)
    return Need(
        fmean(each.num_workers for each in needs), needs[-1].text, tuple(map(fmean, figures))
    )


def held_share(pools: Iterable[tuple[int, int]]) -> float:
    """Return the share of held blocks; each pool has its number of held and of all blocks."""
    counts = list(pools)
    total = sum(num_blocks for _, num_blocks in counts)
    return sum(num_held for num_held, _ in counts) / total if total else 0.0


def _prefill_needs(workers: Sequence[Figures], targets: Targets) -> tuple[Need, ...]:
    busy = sum(worker.busy_permille for worker in workers) / 1000
    pending = sum(worker.num_pending_tokens for worker in workers)
    speeds = [worker.tokens_per_s for worker in workers if worker.tokens_per_s]
    backlog_s = pending * len(speeds) / sum(speeds) if speeds else 0.0
    return (
        Need(
            busy / targets.busy,
            f"workers computed {{:.0%}} of the time (target {targets.busy:.0%})",
            (busy / max(1, len(workers)),),
        ),
        Need(
            backlog_s / targets.ttft_s,
            "{:,.0f} prompt tokens waited, {:.1f} s of one worker "
            f"(target {targets.ttft_s:g} s)",
            (pending, backlog_s),
        ),
    )


def _decode_needs(
    workers: Sequence[Figures], targets: Targets, num_waiting: int, held_share: float
) -> tuple[Need, ...]:
    running = sum(worker.num_running for worker in workers)
    slots = running + sum(worker.num_free_slots for worker in workers)
    asked, num_workers = running + num_waiting, len(workers)
    by_slots = num_workers * asked / (slots * targets.busy) if slots else float(num_waiting > 0)
    step_ms = max((worker.step_us for worker in workers), default=0) / 1000
    within = min(slots, sum(_within(worker, targets.inter_token_s) for worker in workers))
    return (
        Need(
            by_slots,
            f"requests asked for {{:.1f}} of {{:.0f}} slots (target {targets.busy:.0%})",
            (asked, slots),
        ),
        Need(
            num_workers * running / within if within < running else 0.0,
            f"a step took {{:.0f}} ms (target {1000 * targets.inter_token_s:.0f} ms)",
            (step_ms,),
        ),
        Need(
            num_workers * held_share / FULL_BLOCKS,
            f"requests held {{:.0%}} of the blocks (at most {FULL_BLOCKS:.0%})",
            (held_share,),
        ),
    )


def _within(worker: Figures, inter_token_s: float) -> float:
    """Return how many sequences a worker can run at this latency."""
    slots = worker.num_running + worker.num_free_slots
    if not worker.num_running or not worker.step_us:
        return slots
    return min(slots, worker.num_running * 1e6 * inter_token_s / worker.step_us)
