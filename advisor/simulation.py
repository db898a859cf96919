"""Simulates continuous batching, step by step, on a memory of a given size: how much of the
reserved memory holds KV, how many requests run at once, and how many steps all requests take.

A step admits waiting requests in order while the memory has room, computes each running request
that has slots (a whole prompt in one step, then one token a step), and draws one token for each. A
preempted request waits again, at its old place in order, and is recomputed. All requests wait from
the start: the simulation compares memories, not arrival patterns.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.memory import DoesNotFit, Memory, SimulatedRequest, Usage
from advisor.workload import RecordedRequest


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of a simulation.

    `utilization`: share of the reserved slots that held KV, over all steps; `utilization_at_peak`:
    the share in the step with the most KV; `wasted`: the shares of the reserved slots that held no
    KV, one for each of the memory's `waste_kinds`, over all steps.
    """

    num_requests: int
    num_steps: int
    num_preemptions: int
    utilization: float
    utilization_at_peak: float
    wasted: tuple[float, float]
    mean_running: float
    most_running: int
    mean_context: float
    """Tokens with KV of a running request, on average."""

    @property
    def requests_per_1000_steps(self) -> float:
        return 1000 * self.num_requests / self.num_steps


async def simulate(
    requests: Sequence[RecordedRequest], memory: Memory, most_at_once: int | None = None
) -> Outcome:
    """Run all requests, admitted in this order, at most `most_at_once` at a time (None: no limit).
    DoesNotFit: a request can never get its slots."""
    waiting = [
        SimulatedRequest(number, request, request.num_prompt_tokens)
        for number, request in enumerate(requests)
    ]  # sorted, so it is a heap
    running: list[SimulatedRequest] = []
    totals = _Totals()
    while waiting or running:
        await _admit(waiting, running, memory, most_at_once or len(requests))
        computing = [request for request in running if memory.has_slots(request)]
        for request in computing:
            request.num_computed = request.num_tokens
            await memory.commit(request)
        totals.add_step(running, await memory.usage(running))
        for request in computing:
            request.num_tokens += 1
            if request.is_done:
                await memory.release(request)
        running = [request for request in running if not request.is_done]
        for victim in await memory.grow(running):
            totals.num_preemptions += 1
            running.remove(victim)
            victim.num_computed = 0
            heapq.heappush(waiting, victim)
    return totals.outcome(len(requests))


async def _admit(
    waiting: list[SimulatedRequest], running: list[SimulatedRequest], memory: Memory, most: int
) -> None:
    """Admit waiting requests in order until the memory refuses one."""
    while waiting and len(running) < most and await memory.admit(waiting[0]):
        request = heapq.heappop(waiting)
        request.num_starts += 1
        running.append(request)
    if not running:
        raise DoesNotFit(f"an empty memory has no room for {waiting[0].num_tokens} tokens")


class _Totals:
    def __init__(self) -> None:
        self.num_preemptions = 0
        self._num_steps = self._num_running = self._most_running = 0
        self._num_reserved = self._num_kv = self._num_computed = 0
        self._wasted = [0, 0]
        self._peak = Usage(0, 0, (0, 0))

    def add_step(self, running: Sequence[SimulatedRequest], usage: Usage) -> None:
        self._num_steps += 1
        self._num_running += len(running)
        self._most_running = max(self._most_running, len(running))
        self._num_reserved += usage.num_reserved
        self._num_kv += usage.num_kv
        self._num_computed += sum(request.num_computed for request in running)
        for index, num_slots in enumerate(usage.wasted):
            self._wasted[index] += num_slots
        if usage.num_kv > self._peak.num_kv:
            self._peak = usage

    def outcome(self, num_requests: int) -> Outcome:
        first, second = (num_slots / self._num_reserved for num_slots in self._wasted)
        return Outcome(
            num_requests=num_requests,
            num_steps=self._num_steps,
            num_preemptions=self.num_preemptions,
            utilization=self._num_kv / self._num_reserved,
            utilization_at_peak=self._peak.num_kv / self._peak.num_reserved,
            wasted=(first, second),
            mean_running=self._num_running / self._num_steps,
            most_running=self._most_running,
            mean_context=self._num_computed / self._num_running,
        )
