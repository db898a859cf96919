"""Plans how many prefill and decode workers a load needs, for `quire plan` and the metric
`quire:recommended_workers`.

Everything is measured: how busy prefill workers are, and how long their pending prompt tokens take
at their speed; how many decode slots are in use, how many a worker can run within the target for
inter-token latency at its step time, and the share of blocks that is held. See ADR 168.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    """`busy`: the share of a worker's time, or of its decode slots, that a plan uses."""

    ttft_s: float = TTFT_S
    inter_token_s: float = INTER_TOKEN_S
    busy: float = 0.8


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
class RolePlan:
    """`needed`: workers that the load keeps as busy as the targets say. `reason`: what decides."""

    num_workers: int
    needed: float
    reason: str

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
    """Plan for the serving workers of one model. `num_waiting`: requests that no worker has yet.
    `held_share`: held blocks as a share of all blocks of the model's pools."""
    return Plan(
        _prefill(prefill, targets),
        _largest(len(decode), _decode_needs(decode, targets, num_waiting, held_share)),
    )


def mean(plans: Sequence[Plan]) -> Plan:
    """The last plan, with the needs on average over all of them."""
    last, num = plans[-1], len(plans)
    prefill = sum(each.prefill.needed for each in plans) / num
    decode = sum(each.decode.needed for each in plans) / num
    return Plan(replace(last.prefill, needed=prefill), replace(last.decode, needed=decode))


def held_share(pools: Iterable[tuple[int, int]]) -> float:
    """`pools`: held and all blocks of each."""
    counts = list(pools)
    total = sum(num_blocks for _, num_blocks in counts)
    return sum(num_held for num_held, _ in counts) / total if total else 0.0


def _prefill(workers: Sequence[Figures], targets: Targets) -> RolePlan:
    busy = sum(worker.busy_permille for worker in workers) / 1000
    pending = sum(worker.num_pending_tokens for worker in workers)
    speeds = [worker.tokens_per_s for worker in workers if worker.tokens_per_s]
    backlog_s = pending * len(speeds) / sum(speeds) if speeds else 0.0
    return _largest(
        len(workers),
        {
            f"busy {busy / max(1, len(workers)):.0%} of the time": busy / targets.busy,
            f"{pending:,} pending tokens, {backlog_s:.1f} s of one worker": backlog_s
            / targets.ttft_s,
        },
    )


def _decode_needs(
    workers: Sequence[Figures], targets: Targets, num_waiting: int, held_share: float
) -> Mapping[str, float]:
    running = sum(worker.num_running for worker in workers)
    slots = running + sum(worker.num_free_slots for worker in workers)
    if not slots:
        return {"no decode slots": 1.0 if num_waiting else 0.0}
    within = sum(
        min(
            worker.num_running + worker.num_free_slots,
            worker.num_running * 1e6 * targets.inter_token_s / worker.step_us,
        )
        if worker.num_running and worker.step_us
        else worker.num_running + worker.num_free_slots
        for worker in workers
    )
    asked, num_workers = running + num_waiting, len(workers)
    step_ms = max(worker.step_us for worker in workers) / 1000
    within = min(within, slots)
    return {
        f"{asked} of {slots} slots": num_workers * asked / (slots * targets.busy),
        f"a step takes {step_ms:.0f} ms": num_workers * running / within
        if within < running
        else 0.0,
        f"{held_share:.0%} of the blocks held": num_workers * held_share / FULL_BLOCKS,
    }


def _largest(num_workers: int, needs: Mapping[str, float]) -> RolePlan:
    reason, needed = max(needs.items(), key=lambda need: need[1])
    return RolePlan(num_workers, needed, reason)
