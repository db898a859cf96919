"""Simulates continuous batching, step by step, on a KV memory of a given size: how much of the
reserved memory holds KV, how many requests run at once, and how many steps all requests take.

A step admits waiting requests in order while the memory has room, computes each running request
that has slots (a whole prompt in one step, then one token a step), and draws one token for each. A
preempted request waits again, at its old place in order, and is recomputed. All requests wait from
the start: the simulation compares memories, not arrival patterns.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, Self

from advisor.advice import DoesNotFit
from advisor.workload import RecordedRequest
from blockstore.errors import MustWait, OutOfBlocks
from blockstore.memory_store import MemoryStore
from blockstore.records import Growth, PoolSpec, PrefixHash
from services.pool.allotment import (
    LOOK_AHEAD,
    WATERMARK,
    blocks_at_admission,
    blocks_for_decode,
)

_POOL, _WORKER = "simulated", "worker"


@dataclass(slots=True, order=True)
class SimulatedRequest:
    number: int
    asked: RecordedRequest = field(compare=False)
    num_tokens: int = field(compare=False)
    """The prompt and the tokens generated so far."""
    num_computed: int = field(default=0, compare=False)
    """How many of the tokens have KV in the memory."""
    num_starts: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Usage:
    """Slots of a memory at one moment; num_kv + sum(wasted) == num_reserved."""

    num_reserved: int
    num_kv: int
    wasted: tuple[int, int]
    """Reserved slots without KV, one number for each of the memory's `waste_kinds`."""

    @property
    def utilization(self) -> float:
        """The share of the reserved slots that holds KV."""
        return self.num_kv / self.num_reserved


class Memory(Protocol):
    """Reserves slots for the KV of simulated requests."""

    async def admit(self, request: SimulatedRequest) -> bool:
        """Reserve slots for all tokens of a request and one more. False: there are too few free
        slots now; DoesNotFit: there never are enough."""

    def has_slots(self, request: SimulatedRequest) -> bool: ...
    async def commit(self, request: SimulatedRequest) -> None: ...
    async def release(self, request: SimulatedRequest) -> None: ...
    async def grow(self, running: Sequence[SimulatedRequest]) -> Sequence[SimulatedRequest]:
        """Reserve slots for the next tokens. Returns the preempted requests, whose slots are
        free."""

    async def usage(self, running: Sequence[SimulatedRequest]) -> Usage: ...


@dataclass(slots=True)
class _Allocated:
    """A request's holder in the store. Its epoch is always 1."""

    holder_id: str
    block_ids: list[int]
    num_committed: int


class PagedMemory:
    """A pool of a block store, which is asked for blocks as workers ask: at a request's admission,
    and while the request decodes. Full blocks are committed, and found by later requests with that
    prefix."""

    waste_kinds = ("tail", "look-ahead")

    def __init__(self, store: MemoryStore, spec: PoolSpec, max_model_len: int | None) -> None:
        self._store = store
        self._spec = spec
        self._max_model_len = max_model_len
        self._held: dict[int, _Allocated] = {}
        self._prefixes: dict[str, int] = {}

    @classmethod
    async def of(
        cls,
        num_slots: int,
        block_size: int,
        max_model_len: int | None = None,
        watermark: float = WATERMARK,
    ) -> Self:
        """A new pool of `num_slots` token slots. `max_model_len`: the longest that a sequence may
        become as far as its worker knows; None: the worker knows each sequence's length, as if its
        client had sent the exact `max_tokens`."""
        num_blocks, store = num_slots // block_size, MemoryStore()
        reserve = int(watermark * num_blocks)
        spec = PoolSpec(_POOL, "simulated", "simulated", num_blocks, block_size, 1, reserve)
        await store.register_pool(spec)
        await store.register_worker(spec, _WORKER)
        return cls(store, spec, max_model_len)

    async def admit(self, request: SimulatedRequest) -> bool:
        size, num_blocks = self._spec.block_size, self._spec.num_blocks
        if request.asked.num_tokens > num_blocks * size:
            raise DoesNotFit(
                f"a request of {request.asked.num_tokens} tokens never fits a pool of "
                f"{num_blocks} blocks of {size}"
            )
        hashes = [self._hash(request, index) for index in range(request.num_tokens // size)]
        holder_id = f"{request.number}.{request.num_starts}"
        wanted = blocks_at_admission(request.num_tokens, size)
        try:
            found = await self._store.allocate(
                _POOL, holder_id, _WORKER, request.number + 1, hashes, wanted
            )
        except (OutOfBlocks, MustWait):
            return False
        self._held[request.number] = _Allocated(
            holder_id, list(found.block_ids), found.num_cached_blocks
        )
        return True

    def has_slots(self, request: SimulatedRequest) -> bool:
        num_blocks = len(self._held[request.number].block_ids)
        return request.num_tokens <= num_blocks * self._spec.block_size

    async def commit(self, request: SimulatedRequest) -> None:
        held = self._held[request.number]
        new = range(held.num_committed, request.num_computed // self._spec.block_size)
        if new:
            held.num_committed = new.stop
            blocks = [(held.block_ids[index], self._hash(request, index)) for index in new]
            await self._store.commit(_POOL, held.holder_id, 1, blocks)

    async def grow(self, running: Sequence[SimulatedRequest]) -> Sequence[SimulatedRequest]:
        """Ask for the missing blocks again after each preemption, as a worker does."""
        staying, victims = list(running), list[SimulatedRequest]()
        while growths := [growth for request in staying if (growth := self._growth_of(request))]:
            extension = await self._store.extend(_POOL, _WORKER, growths)
            by_holder = {self._held[request.number].holder_id: request for request in staying}
            for grown in extension.grown:
                self._held[by_holder[grown.holder_id].number].block_ids += grown.block_ids
            if not extension.demands:
                break
            for victim in (by_holder[holder_id] for holder_id in extension.demands):
                await self.release(victim, comes_back=True)
                staying.remove(victim)
                victims.append(victim)
        return victims

    async def usage(self, running: Sequence[SimulatedRequest]) -> Usage:
        """Count shared blocks once. A held block is full of KV, except the last blocks of each
        sequence: those belong to one sequence only.

            block table   |=======|=======|====...|.......|
                            full    full    tail    look-ahead
        """
        size = self._spec.block_size
        num_held = (await self._store.stats(_POOL)).num_held
        num_own = num_in_tails = num_tails = 0
        for request in running:
            num_full, num_in_tail = divmod(request.num_computed, size)
            num_own += len(self._held[request.number].block_ids) - num_full
            num_in_tails += num_in_tail
            num_tails += num_in_tail > 0
        wasted = (num_tails * size - num_in_tails, (num_own - num_tails) * size)
        return Usage(num_held * size, (num_held - num_own) * size + num_in_tails, wasted)

    def _growth_of(self, request: SimulatedRequest) -> Growth | None:
        held, size = self._held[request.number], self._spec.block_size
        longest = request.asked.num_tokens
        if self._max_model_len is not None:
            room = self._spec.num_blocks * size  # the gateway refuses requests that need more
            longest = max(longest, min(self._max_model_len, room))
        total = blocks_for_decode(request.num_tokens, LOOK_AHEAD, longest, size)
        have = len(held.block_ids)
        return Growth(held.holder_id, 1, have, total) if total > have else None

    async def release(self, request: SimulatedRequest, *, comes_back: bool = False) -> None:
        holder_id = self._held.pop(request.number).holder_id
        await self._store.release(_POOL, holder_id, 1, comes_back)

    def _hash(self, request: SimulatedRequest, index: int) -> PrefixHash:
        """A stand-in for the prefix hash of a request's block: two are equal exactly if all tokens
        up to the ends of their blocks are."""
        owner, asked = 2 * request.number, request.asked
        if (index + 1) * self._spec.block_size <= asked.num_shared_tokens:
            owner = 2 * self._prefixes.setdefault(asked.prefix, len(self._prefixes)) + 1
        return (owner << 64 | index).to_bytes(16, "big")


@dataclass(slots=True)
class Outcome:
    """The result of a simulation, and its sums while it runs."""

    num_requests: int
    num_steps: int = 0
    num_preemptions: int = 0
    most_running: int = 0
    num_running: int = 0
    """Running requests, over all steps; so are the following sums."""
    usage: Usage = Usage(0, 0, (0, 0))
    peak: Usage = Usage(0, 0, (0, 0))
    """The step with the most KV."""

    def add_step(self, running: Sequence[SimulatedRequest], now: Usage) -> None:
        self.num_steps += 1
        self.num_running += len(running)
        self.most_running = max(self.most_running, len(running))
        wasted = self.usage.wasted[0] + now.wasted[0], self.usage.wasted[1] + now.wasted[1]
        self.usage = Usage(
            self.usage.num_reserved + now.num_reserved, self.usage.num_kv + now.num_kv, wasted
        )
        self.peak = max(self.peak, now, key=lambda usage: usage.num_kv)

    @property
    def utilization(self) -> float:
        return self.usage.utilization

    @property
    def utilization_at_peak(self) -> float:
        return self.peak.utilization

    @property
    def wasted(self) -> tuple[float, float]:
        """The shares of the reserved slots without KV, for each of the memory's `waste_kinds`."""
        first, second = self.usage.wasted
        return first / self.usage.num_reserved, second / self.usage.num_reserved

    @property
    def mean_running(self) -> float:
        return self.num_running / self.num_steps

    @property
    def requests_per_1000_steps(self) -> float:
        return 1000 * self.num_requests / self.num_steps


async def simulate(requests: Sequence[RecordedRequest], memory: Memory) -> Outcome:
    """Run all requests, admitted in this order. DoesNotFit: a request can never get its slots."""
    waiting = [
        SimulatedRequest(number, request, request.num_prompt_tokens)
        for number, request in enumerate(requests)
    ]  # sorted, so it is a heap
    running, outcome = list[SimulatedRequest](), Outcome(len(requests))
    while waiting or running:
        while waiting and await memory.admit(waiting[0]):
            running.append(heapq.heappop(waiting))
            running[-1].num_starts += 1
        if not running:
            raise DoesNotFit(f"an empty memory has no room for {waiting[0].num_tokens} tokens")
        computing = [request for request in running if memory.has_slots(request)]
        for request in computing:
            request.num_computed = request.num_tokens
            await memory.commit(request)
        outcome.add_step(running, await memory.usage(running))
        for request in computing:
            request.num_tokens += 1
            if request.num_tokens == request.asked.num_tokens:
                await memory.release(request)
                running.remove(request)
        for victim in await memory.grow(running):
            outcome.num_preemptions += 1
            running.remove(victim)
            victim.num_computed = 0
            heapq.heappush(waiting, victim)
    return outcome
